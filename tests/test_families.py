"""Families: exact dimensions, fast building, prompts and pictures."""

from __future__ import annotations

import pytest
import torch
from sessions import open_session

from vlmbench import compat, inputs, kinds, weights
from vlmbench.errors import UsageError

MODELS = kinds.models()
OFFICIAL = [m for m in MODELS.values() if m.suite == "name"]


def family_of(model: str):
    return kinds.load("family", MODELS[model].family)


@pytest.mark.parametrize("model", [m.name for m in OFFICIAL])
def test_parameters_are_those_published(model: str) -> None:
    module = family_of(model)
    cls = compat.model_class(module.FAMILY.model_class)
    with torch.device("meta"):
        built = cls(module.FAMILY.config(model))
    assert weights.count(built) == pytest.approx(module.PUBLISHED[model], rel=0.005)


@pytest.mark.parametrize("model", [m.name for m in MODELS.values() if m.name.endswith("-tiny")])
def test_tiny_means_below_three_million_parameters_and_two_layers(model: str) -> None:
    session = open_session(kinds.make_case(model, "dynamic", "eager"))
    assert weights.count(session.model) < 3_000_000
    assert session.model.config.get_text_config().num_hidden_layers == 2
    image = family_of(model).FAMILY.image_token(session.model.config)
    assert image < session.model.config.get_text_config().vocab_size
    assert (session.prompt["input_ids"] == image).sum() == 16


def test_cache_traffic_is_most_of_a_wide_step() -> None:
    session = open_session(kinds.make_case("llava-wide-8k", "static", "eager"))
    session.ready()
    text = session.model.model.language_model
    weight_bytes = sum(p.numel() * p.element_size() for p in text.parameters())
    assert session.kind.nbytes(session.cache) > weight_bytes


def test_weights_depend_on_name_and_shape_alone() -> None:
    family = family_of("llava-tiny").FAMILY
    case = kinds.make_case("llava-tiny", "dynamic", "eager")
    first = family.build(case, torch.float32)
    torch.manual_seed(99)
    second = family.build(case, torch.float32)
    assert weights.fingerprint(first) == weights.fingerprint(second)
    with torch.no_grad():
        second.lm_head.weight[3, 5] += 1e-3
    assert weights.fingerprint(first) != weights.fingerprint(second)


def test_prompts_repeat_and_rows_differ() -> None:
    session = open_session(kinds.make_case("qwen2_vl-tiny", "dynamic", "eager", batch=2))
    again = session.make_prompt(session.case.prompt_tokens)
    assert all(torch.equal(session.prompt[name], again[name]) for name in again)
    ids = session.prompt["input_ids"]
    assert not torch.equal(ids[0], ids[1])
    half = session.make_prompt(8)["input_ids"]
    assert half.shape[1] == ids.shape[1] - 24


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_every_format_is_read(tmp_path, suffix: str) -> None:
    path = tmp_path / f"photo.{suffix}"
    inputs.load_image("").save(path)
    assert inputs.load_image(str(path)).size == (512, 512)


def test_pictures_that_cannot_be_used_are_named(tmp_path) -> None:
    from PIL import Image

    broken = tmp_path / "cut.jpg"
    broken.write_bytes(inputs.photograph().read_bytes()[:20_000])
    with pytest.raises(UsageError, match=r"cut\.jpg.*is it complete"):
        inputs.load_image(str(broken))
    text = tmp_path / "no.png"
    text.write_text("not a picture")
    with pytest.raises(UsageError, match=r"no\.png.*not a readable JPEG, PNG, WEBP"):
        inputs.load_image(str(text))
    Image.new("1", (10_000, 9_000)).save(tmp_path / "huge.png")
    with pytest.raises(UsageError, match="10000 x 9000 pixels"):
        inputs.load_image(str(tmp_path / "huge.png"))
    with pytest.raises(UsageError, match="does not exist"):
        inputs.load_image(str(tmp_path / "none.png"))


def test_a_picture_turned_by_its_exif_data_stands_upright(tmp_path) -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert inputs.load_image(str(tmp_path / "turned.jpg")).size == (20, 40)
