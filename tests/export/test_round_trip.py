"""What was imported and is exported again is what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from meristem import export_run, import_model
from pretrained.helpers import CHECKPOINTS, VOCABULARY, random_model, saved, their_logits

TOKENS = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ["llama", "llama with groups, tied", "llama 3", "mistral", "qwen3", "qwen3, tied"])
def test_every_weight_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    family, settings = CHECKPOINTS[name]
    folder = saved(random_model(family, **settings), tmp_path / "hf")
    import_model(folder, tmp_path / "run")
    done = export_run(tmp_path / "run", tmp_path / "out", "llama")
    assert "nothing is padded" in done.notes[0]
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["qwen2", "olmo", "llama with linear scaling", "llama with another head dim"])
@pytest.mark.parametrize("to", ["hf", "llama"])
def test_logits_come_back(name: str, to: str, tmp_path: Path) -> None:
    family, settings = CHECKPOINTS[name]
    theirs = random_model(family, **settings)
    import_model(saved(theirs, tmp_path / "hf"), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", to)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(their_logits(again, TOKENS), their_logits(theirs, TOKENS), rtol=0, atol=1e-4)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| data | none: the model was imported |" in card
    assert "| steps |" not in card
