"""Real checkpoints: saved by the test with a tokenizer it builds, loaded as a user's would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from vlmbench import compat, inputs, kinds, meters, weights
from vlmbench.check import run as run_checks
from vlmbench.compiles import Compiles
from vlmbench.errors import UsageError
from vlmbench.families import _checkpoint
from vlmbench.phases import Session
from vlmbench.schema import Case

FAMILY = kinds.load("family", "llava").FAMILY


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of the question, plus what a chat needs; ids below llava-tiny's vocabulary."""
    words = sorted(set(inputs.QUESTION.replace(":", " :").replace(",", " ,").replace(".", " .").split()))
    vocabulary = {word: i + 3 for i, word in enumerate(words)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.pad_token = "</s>"
    filler = [f"<filler{i}>" for i in range(1000 - len(fast))]
    fast.add_tokens(filler)
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert fast.convert_tokens_to_ids("<image>") == 1000
    return fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llava checkpoint with weights, processor and chat template."""
    where = tmp_path_factory.mktemp("checkpoint")
    case = kinds.make_case("llava-tiny", "dynamic", "eager")
    FAMILY.build(case, torch.float32).save_pretrained(where)
    processor = LlavaProcessor(
        image_processor=FAMILY.image_processor("llava-tiny"),
        tokenizer=tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="full",
        chat_template="{% for m in messages %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}",
    )
    processor.save_pretrained(where)
    return where


def checkpoint_case(where: Path, **given: object) -> Case:
    return kinds.make_case(where.name, "static", "eager", checkpoint=str(where), **given)


def opened(case: Case) -> Session:
    loaded = FAMILY.load(case, torch.float32)
    return Session(case, FAMILY, loaded, kinds.load("cache", case.cache).KIND, meters.Cpu(), Compiles())


def test_weights_and_processor_are_the_checkpoints(folder: Path) -> None:
    session = opened(checkpoint_case(folder, new_tokens=8))
    assert session.facts["weights"] == str(folder)
    built = FAMILY.build(kinds.make_case("llava-tiny", "dynamic", "eager"), torch.float32)
    assert weights.fingerprint(session.model) == weights.fingerprint(built)
    assert (session.prompt["input_ids"] == 1000).sum() == 16
    assert 40 <= session.length <= 60
    checks, _, _ = run_checks(session)
    assert [c for c in checks if not c["passed"]] == []


def test_the_processor_comes_from_autoprocessor_or_the_record_says_why_not(folder: Path) -> None:
    how = opened(checkpoint_case(folder)).facts["processor"]
    assert how.startswith(("AutoProcessor: LlavaProcessor", "put together from"))


def test_parts_are_put_together_where_autoprocessor_cannot_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(where: str) -> None:
        raise ImportError("LlavaProcessor requires torchvision")

    monkeypatch.setattr(_checkpoint.AutoProcessor, "from_pretrained", missing)
    session = opened(checkpoint_case(folder, new_tokens=8, batch=2))
    assert session.facts["processor"].startswith("put together from")
    assert "requires torchvision" in session.facts["processor"]
    assert session.length == 32 + 16
    checks, _, _ = run_checks(session)
    assert [c for c in checks if not c["passed"]] == []


def test_a_folder_that_is_no_checkpoint_is_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        _checkpoint.config(str(tmp_path))
    with pytest.raises(UsageError, match="is no folder"):
        _checkpoint.config(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UsageError, match="has no weights"):
        _checkpoint.config(str(tmp_path))
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="no usable tokenizer and image processor"):
        FAMILY.load(checkpoint_case(tmp_path), torch.float32)


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refused(where: str) -> None:
        raise OSError("we could not connect to the hub\nand more")

    monkeypatch.setattr(_checkpoint.AutoConfig, "from_pretrained", refused)
    with pytest.raises(UsageError) as caught:
        _checkpoint.config("nobody/nothing")
    assert "nobody/nothing" in str(caught.value) and "\n" not in str(caught.value)


def test_attention_that_cannot_be_had_is_unsupported() -> None:
    from vlmbench.errors import Unsupported

    case = kinds.make_case("llava-tiny", "static", "eager", attention="flash_attention_2")
    with pytest.raises(Unsupported, match="attention 'flash_attention_2'"):
        FAMILY.load(case, torch.float32)
    assert compat.observed_attention(FAMILY.build(kinds.make_case("llava-tiny", "static", "eager"), torch.float32))
