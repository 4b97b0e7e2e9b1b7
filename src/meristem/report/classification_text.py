"""A classifier's results for the terminal."""

from __future__ import annotations

import numpy as np

from meristem.evaluation.evaluate_classifier import ClassEvaluation, label_counts
from meristem.wording import counted

WIDEST = 12  # classes of a confusion matrix that fits on a terminal; of larger ones the largest entries are listed


def classification_text(result: ClassEvaluation) -> str:
    """A few lines, a table of the classes, and who was taken for whom."""
    scores = result.scores
    lines = [
        f"{result.run}, step {result.step}{', average of the weights' * result.average}: "
        f"accuracy {scores.accuracy:.4f}, macro-F1 {scores.macro_f1:.4f}, "
        f"loss {scores.loss:.4f} over {counted(scores.rows, 'row')} of {result.data}",
        f"{result.unknown:.2%} of the pieces are not in the vocabulary",
    ]
    if result.cut:
        lines.append(f"{counted(result.cut, 'row')} longer than the model reads")
    if result.bad:
        lines.append(f"{counted(result.bad, 'bad place')} skipped")
    if result.other_labels:
        rows = counted(sum(result.other_labels.values()), "row")
        lines.append(
            f"left out: {rows} with labels that the run does not know, "
            f"{label_counts(result.other_labels)}; counted as wrong, the accuracy is {result.accuracy_of_all:.4f}"
        )
    width = max(len("class"), *map(len, result.classes))
    lines.append(f"{'class':<{width}}     rows  precision  recall      F1")
    columns = zip(result.classes, scores.support, scores.precision, scores.recall, scores.f1, strict=True)
    for label, support, *shares in columns:
        precision, recall, f1 = ("-" if np.isnan(share) else f"{share:.4f}" for share in shares)
        lines.append(f"{label:<{width}}  {support:>7,}  {precision:>9}  {recall:>6}  {f1:>6}")
    return "\n".join([*lines, *(_matrix(result) if len(result.classes) <= WIDEST else _confusions(result))])


def _matrix(result: ClassEvaluation) -> list[str]:
    confusion, classes = result.scores.confusion, result.classes
    side = max(map(len, classes))
    widths = [max(len(label), len(str(column.max()))) for label, column in zip(classes, confusion.T, strict=True)]
    lines = ["rows by class (down) and by the class they were taken for (across):"]
    lines.append(" " * side + "".join(f"  {label:>{w}}" for label, w in zip(classes, widths, strict=True)))
    for label, row in zip(classes, confusion.tolist(), strict=True):
        lines.append(f"{label:<{side}}" + "".join(f"  {count:>{w}}" for count, w in zip(row, widths, strict=True)))
    return lines


def _confusions(result: ClassEvaluation, limit: int = 10) -> list[str]:
    wrong = result.scores.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[i, j]]
    if not pairs:
        return []
    return ["most frequent confusions (the whole matrix is in the result):"] + [
        f"{result.classes[i]} taken for {result.classes[j]}: {wrong[i, j]} of {result.scores.support[i]}"
        for i, j in pairs
    ]
