"""``tierkv calibrate``: tables from prompts into a file that a node of that model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tierkv.commands.calibrate import calibrate  # noqa: E402
from tierkv.compute.codec.entropy import load_calibration  # noqa: E402
from tierkv.compute.loading import load_model  # noqa: E402
from tierkv.kvcore.errors import ConfigError  # noqa: E402
from tierkv.kvcore.ids import HostId, NodeId  # noqa: E402
from tierkv.kvcore.layout import KvCodec  # noqa: E402
from tierkv.kvcore.node import NodeRole  # noqa: E402
from tierkv.parts.served_models import compute_config, model_folder  # noqa: E402
from tierkv.settings import ComputeSettings  # noqa: E402
from tierkv.storage.modelfiles.model_folder import CALIBRATION_NAME  # noqa: E402

TEXT = "Customer: Jonas Ortiz. City: Oslo. Product: blender. Review: It never lets me down.\n"


def settings(**changes: str) -> ComputeSettings:
    return ComputeSettings(threads=1, **changes)


def node_config(chosen: ComputeSettings):
    return compute_config(chosen, node_id=NodeId("c"), host=HostId("h"), role=NodeRole.COMPUTE)


def test_a_text_becomes_tables_that_a_node_loads(tmp_path: Path) -> None:
    text = tmp_path / "sample.txt"
    text.write_text(TEXT * 60)
    written = calibrate(settings(), prompts=text, out=tmp_path)
    assert written == tmp_path / CALIBRATION_NAME
    chosen = settings(kv_codec="entropy-coarse", kv_calibration=str(written), l1_capacity="8MiB")
    loaded = load_model(node_config(chosen))
    assert loaded.info.layout.codec is KvCodec.ENTROPY_COARSE
    assert loaded.decoder.pages.codecs.has(KvCodec.ADAPTIVE)
    again = calibrate(settings(), prompts=text, out=tmp_path / "again.safetensors")
    tables = [
        load_calibration(file, loaded.info.layout, revision=loaded.info.revision)
        for file in (written, again)
    ]
    assert tables[0].number == tables[1].number and torch.equal(tables[0].mean, tables[1].mean)
    fine, medium, coarse = tables[0].steps
    assert (fine < medium).all() and (medium < coarse).all()


def test_the_shipped_model_has_tables_of_its_own() -> None:
    loaded = load_model(node_config(settings(kv_codec="entropy-fine", l1_capacity="8MiB")))
    file = model_folder(settings()) / CALIBRATION_NAME
    load_calibration(file, loaded.info.layout, revision=loaded.info.revision)
    assert loaded.decoder.pages.codecs.has(KvCodec.ENTROPY_FINE)


def test_the_shipped_tables_are_replaced_only_where_the_caller_says() -> None:
    shipped = model_folder(settings()) / CALIBRATION_NAME
    before = shipped.read_bytes()
    with pytest.raises(
        ConfigError, match="the tables of the shipped model are part of the installation"
    ) as refused:
        calibrate(settings(), prompts=None, out=None)
    assert "--out" in refused.value.hint
    assert shipped.read_bytes() == before


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nonexist"
    with pytest.raises(ConfigError, match="nonexist does not exist") as refused:
        calibrate(settings(model=str(missing)), prompts=None, out=None)
    assert "--model" in refused.value.hint


def test_what_can_not_be_measured_is_refused_with_a_cure(tmp_path: Path) -> None:
    other = settings(model=str(model_folder(settings())))
    with pytest.raises(ConfigError) as refused:
        calibrate(other, prompts=None, out=tmp_path)
    assert "--prompts" in refused.value.hint
    with pytest.raises(ConfigError, match="can't read"):
        calibrate(other, prompts=tmp_path / "missing.txt", out=tmp_path)
    short = tmp_path / "short.txt"
    for text in (TEXT, "", " \n"):
        short.write_text(text)
        with pytest.raises(ConfigError, match="too short"):
            calibrate(other, prompts=short, out=tmp_path)
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 20)
    with pytest.raises(ConfigError, match="can't write"):
        calibrate(other, prompts=long, out=tmp_path / "no" / "folder")
    assert not list(tmp_path.glob("*.safetensors"))
