"""Local tasks are the harness's own but for where the rows come from; and `meristem eval --tasks`, whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Call
from data.helpers import SHARED, needs_shared
from meristem.errors import InputError, RunError
from meristem.export import export_run
from meristem.runs.run_folder import RunFolder, load_run
from training.helpers import prepared, trained

from .helpers import ARC, HELLASWAG, blimp_parts, write_copies

pytest.importorskip("lm_eval", reason="needs the extra eval (make test-eval)")

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from meristem.evaluation.harness import local_data
from meristem.evaluation.harness import tasks as loading
from meristem.evaluation.harness.evaluate import TASKS_FILE, evaluate_tasks, harness_results
from meristem.evaluation.harness.exported import load_lm
from meristem.evaluation.harness.lm import MeristemLM
from meristem.evaluation.harness.tasks import LOCAL_TASKS, load_tasks

THEIRS = Path(lm_eval.tasks.__file__).parent
SEVEN = ["hellaswag", "piqa", "arc_easy", "winogrande", "blimp", "lambada_openai", "wikitext"]
DATA_KEYS = {
    "tag", "dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "training_split", "validation_split",
    "test_split",
}  # fmt: skip
UIDS = blimp_parts()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copies(tmp_path_factory.mktemp("copies"), UIDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("run")
    return trained(prepared(folder), folder / "run", model__context=96, train__average=0.9, optimizer__lr=1e-2)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a task of one's own."""
    rows = [{"q": f"{n} and 1 is", "a": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 5}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return tmp_path / "own"


def functions_by_name(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value.__qualname__ if callable(value) else value for key, value in config.items()}


@pytest.mark.parametrize(
    ("ours", "theirs", "adapted"),
    [
        ("hellaswag.yaml", "hellaswag/hellaswag.yaml", set()),
        ("piqa.yaml", "piqa/piqa.yaml", set()),
        ("arc_easy.yaml", "arc/arc_easy.yaml", {"doc_to_target", "doc_to_choice"}),
        ("winogrande.yaml", "winogrande/default.yaml", set()),
        ("lambada_openai.yaml", "lambada/lambada_openai.yaml", set()),
        ("wikitext.yaml", "wikitext/wikitext.yaml", set()),
        ("blimp/_blimp.yaml", "blimp/_blimp.yaml", set()),
        *((f"blimp/{uid}.yaml", f"blimp/{uid}.yaml", set()) for uid in UIDS),
    ],
)
def test_task_files_differ_from_the_harness_in_their_data_only(ours: str, theirs: str, adapted: set[str]) -> None:
    found, expected = (
        {key: value for key, value in functions_by_name(load_yaml(path)).items() if key not in DATA_KEYS | adapted}
        for path in (LOCAL_TASKS / ours, THEIRS / theirs)
    )
    assert found == expected
    assert len(UIDS) == 67


def requests_of(loaded: dict[str, Any], name: str) -> list[list[tuple[str, ...]]]:
    """The texts of each row."""
    task = loaded["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(rank=0, world_size=1)
    rows: dict[int, list[tuple[str, ...]]] = {}
    for instance in task.instances:
        rows.setdefault(instance.doc_id, []).append(instance.args)
    return list(rows.values())


def test_rows_become_the_texts_of_the_harness(copies: Path) -> None:
    loaded = load_tasks(SEVEN, copies)
    assert requests_of(loaded, "hellaswag")[0] == [
        ("Roof removal: A man sits on a roof. He", f" {ending}")
        for ending in (" wraps skis.", "rips tiles off.", "holds a cube.", "starts pulling.")
    ]
    assert requests_of(loaded, "hellaswag")[1][1] == ("Baking: How to bake. Warm up. Wait.", " Mix it.")
    assert [loaded["tasks"]["hellaswag"].doc_to_target(doc) for doc in loaded["tasks"]["hellaswag"].eval_docs] == [3, 1]
    jar = "Question: Open a jar\nAnswer:"
    assert requests_of(loaded, "piqa")[0] == [(jar, " turn the lid"), (jar, " turn the jar")]
    assert requests_of(loaded, "arc_easy")[1] == [
        ("Question: What flies?\nAnswer:", " a bird"), ("Question: What flies?\nAnswer:", " a stone"),
    ]  # fmt: skip
    assert requests_of(loaded, "winogrande")[0] == [
        ("Ann beat Bo so Ann", " was glad."),
        ("Ann beat Bo so Bo", " was glad."),
    ]
    assert requests_of(loaded, "lambada_openai")[1] == [("Give it to", " Shane")]
    assert requests_of(loaded, "blimp_wh_island")[1] == [("", " Cats sleep 1."), ("", " Cats sleeps 1.")]
    assert requests_of(loaded, "wikitext") == [
        [(" = One =\n\nA man-made thing, of 1,000.\n== Part ==\n\nIt is. ",)], [(" = Two =\n\nMore.\n",)],
    ]  # fmt: skip
    assert loaded["groups"]["blimp"].child_names == [f"blimp_{uid}" for uid in UIDS]


def test_choices_with_labels_beside_them_are_those_with_labels_inside() -> None:
    ours, theirs = load_yaml(LOCAL_TASKS / "arc_easy.yaml"), load_yaml(THEIRS / "arc/arc_easy.yaml")
    for row in ARC:
        nested = {**row, "choices": {"text": row["choices"], "label": row["labels"]}}
        for key in ("doc_to_target", "doc_to_choice"):
            assert lm_eval.utils.apply_template(ours[key], row) == lm_eval.utils.apply_template(theirs[key], nested)


@needs_shared
def test_the_shared_copies_have_the_published_sizes() -> None:
    loaded = load_tasks(["piqa", "winogrande", "wikitext"], SHARED)
    assert {name: len(task.eval_docs) for name, task in loaded["tasks"].items()} == {
        "piqa": 1838, "winogrande": 1267, "wikitext": 62,
    }  # fmt: skip


def test_a_run_and_its_export_have_equal_samples(run: RunFolder, copies: Path, tmp_path: Path) -> None:
    folder = export_run(run.path, tmp_path / "exported").folder
    loaded = load_run(run.path, device="cpu")
    names = ["hellaswag", "piqa", "arc_easy", "winogrande", "lambada_openai", "wikitext", "blimp_wh_island"]
    models = (MeristemLM(loaded.decoder, loaded.tokenizer, batch=5), load_lm(folder, torch.device("cpu"), 1))
    ours, theirs = (harness_results(lm, load_tasks(names, copies)) for lm in models)
    assert ours["samples"].keys() == theirs["samples"].keys() == set(names)
    for name in names:
        for mine, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert mine["arguments"] == other["arguments"]
            for found, expected in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                pair = (found, expected) if isinstance(found, tuple) else ((found, True), (expected, True))
                assert pair[0] == (pytest.approx(pair[1][0], abs=1e-4, rel=1e-6), pair[1][1])


def test_the_command_shows_a_table_with_standard_errors(run: RunFolder, copies: Path, call: Call) -> None:
    said = call("eval", run.path, "--tasks", ",".join(SEVEN), "--data", copies, "--limit", "2", "--batch", "7")
    assert said.code == 0, said.err
    table = [line.split() for line in said.out.splitlines()]
    assert ["task", "metric", "value", "standard", "error", "rows", "better"] in table
    rows = {(line[0], line[1]): line[2:] for line in table if line and line[0] in SEVEN}
    assert list(dict.fromkeys(task for task, _ in rows)) == SEVEN
    assert rows["blimp", "acc"][1] == "±"
    assert rows["blimp", "acc"][-2:] == ["134", "higher"]
    assert rows["lambada_openai", "perplexity"][1] == "±"
    assert rows["wikitext", "bits_per_byte"][1:] == ["-", "2", "lower"]
    assert "only the first 2 rows of each task" in said.out
    assert said.err == ""
    stored = json.loads((run.path / TASKS_FILE).read_text(encoding="utf-8"))
    assert (stored["step"], stored["limit"], stored["versions"]["torch"]) == (12, 2, torch.__version__)
    assert sum(metric["group"] == "blimp" for metric in stored["metrics"]) == 67
    assert f"result: {run.path / TASKS_FILE}" in said.out


def test_json_average_and_out(run: RunFolder, copies: Path, tmp_path: Path, call: Call) -> None:
    said = call("eval", run.path, "--tasks", "piqa", "--data", copies, "--average", "--json", "--out", tmp_path)
    found = json.loads(said.out)
    assert [metric["metric"] for metric in found["metrics"]] == ["acc", "acc_norm"]
    assert found == json.loads((tmp_path / "eval-tasks-average.json").read_text())
    assert (found["average"], found["requests"], found["cut"]) == (True, 6, 0)


def test_an_exported_folder_stays_as_it_was(run: RunFolder, copies: Path, tmp_path: Path, call: Call) -> None:
    folder = export_run(run.path, tmp_path / "exported").folder
    before = sorted(path.name for path in folder.iterdir())
    said = call("eval", folder, "--tasks", "piqa", "--data", copies, "--out", tmp_path / "out", "--device", "cpu")
    assert said.code == 0, said.err
    assert sorted(path.name for path in folder.iterdir()) == before
    found = json.loads((tmp_path / "out" / TASKS_FILE).read_text())
    native = evaluate_tasks(run.path, ["piqa"], data=copies, device="cpu", out=tmp_path / "native")
    assert [metric["value"] for metric in found["metrics"]] == [metric.value for metric in native.metrics]
    assert (found["step"], found["context"]) == (None, 96)
    said = call("eval", folder, "--tasks", "piqa", "--data", copies, "--step", "4")
    assert (said.code, "step = '4': means nothing here" in said.err) == (2, True)


def test_a_continuation_longer_than_the_context_is_refused_of_an_export_only(run: RunFolder, tmp_path: Path) -> None:
    folder = export_run(run.path, tmp_path / "exported").folder
    (tmp_path / "zeroshot").mkdir()
    row = {"goal": "a", "sol1": "b" * 120, "sol2": "c", "label": 0}
    (tmp_path / "zeroshot/piqa_valid.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match="continuation = 121: tokens are too many for its context of 96"):
        evaluate_tasks(folder, ["piqa"], data=tmp_path, device="cpu")
    result = evaluate_tasks(run.path, ["piqa"], data=tmp_path, device="cpu", out=tmp_path)
    assert (result.cut, result.metrics[0].error) == (1, None)  # of one row there is no standard error
    assert "1 of 2 requests did not fit into the context of 96" in str(result)


def test_an_own_folder_of_tasks(run: RunFolder, copies: Path, own: Path) -> None:
    for data in (None, copies):
        result = evaluate_tasks(run.path, ["sums"], data=data, task_folder=own, device="cpu", limit=3)
        assert [(metric.task, metric.metric, metric.rows) for metric in result.metrics] == [("sums", "exact_match", 3)]


def test_the_task_in_the_guide(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs/tasks.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "capitals.yaml").write_text(text)
    row = {"country": "Peru", "cities": ["Lima", "Quito"], "right": 0}
    (tmp_path / "capitals.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_tasks(["capitals"], None, tmp_path / "own")
    assert requests_of(loaded, "capitals") == [
        [("The capital of Peru is", " Lima"), ("The capital of Peru is", " Quito")]
    ]
    result = evaluate_tasks(run.path, ["capitals"], task_folder="own", device="cpu", out=tmp_path)
    assert [metric.metric for metric in result.metrics] == ["acc"]


def test_names_that_are_not_known(copies: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "arc_easy, blimp, hellaswag, lambada_openai, piqa, wikitext, winogrande"
    with pytest.raises(InputError, match=f"tasks = 'boolq': is not known with local copies; there are {listed}$"):
        load_tasks(["piqa", "boolq"], copies)
    with pytest.raises(InputError, match=r"sums, wikitext, .* that describe no task are passed over"):
        load_tasks(["boolq"], copies, own)
    with pytest.raises(InputError, match="must each have tasks of their own"):
        load_tasks(["blimp", "blimp_wh_island"], copies)

    class Few(TaskManager):  # type: ignore[misc]  # all of its own takes it many seconds
        def __init__(self, include_path: Any = (), **_: Any) -> None:
            super().__init__(include_path=[THEIRS / "piqa", *include_path], include_defaults=False)

    monkeypatch.setattr(loading, "TaskManager", Few)
    with pytest.raises(InputError, match=r"tasks = 'piqaa': is not known to lm-evaluation-harness; it has piqa$"):
        load_tasks(["piqaa"])
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        RunError, match=r"the rows of piqa cannot be fetched \(ConnectionError: no network\); .* local copies"
    ):
        load_tasks(["piqa"])
    with pytest.raises(RunError, match=r"the rows of sums cannot be read \(ConnectionError: no network\)$"):
        load_tasks(["sums"], None, own)


def unreachable(*_: Any, **__: Any) -> None:
    raise ConnectionError("no network\nat all")


def test_missing_files_and_folders_are_named(copies: Path, tmp_path: Path, run: RunFolder, call: Call) -> None:
    said = call("eval", run.path, "--tasks", "piqa,hellaswag", "--data", tmp_path)
    assert (said.code, "holds no zeroshot/piqa_valid.jsonl.gz" in said.err) == (2, True)
    for options in ({"data": tmp_path / "none"}, {"task_folder": tmp_path / "none"}):
        with pytest.raises(InputError, match=f"^{next(iter(options))} = .*must be a folder"):
            evaluate_tasks(run.path, ["piqa"], **{"data": copies, **options})  # type: ignore[arg-type]


def test_the_local_rows_are_not_kept(copies: Path) -> None:
    assert len(HELLASWAG) == len(load_tasks(["hellaswag"], copies)["tasks"]["hellaswag"].eval_docs)
    assert local_data._rows.cache_info().currsize == 0
