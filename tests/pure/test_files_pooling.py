"""How a model's own files say that its hidden states become one vector, and what is done where they do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quire.files import gguf
from quire.files.pooling import read_pooling
from quire.files.source import ModelFiles
from quire.types import PoolingRule, QuireError, choose_pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
LAST = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def rule_of(folder: Path, modules: Any, config: Any) -> PoolingRule | None:
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return read_pooling(ModelFiles("folder", folder, "x", {}))


@pytest.mark.parametrize(
    "modules,config,kind,normalize",
    [
        ([TRANSFORMER, POOLING, NORMALIZE], LAST, "last", True),
        ([TRANSFORMER, POOLING], LAST, "last", False),
        ([TRANSFORMER, POOLING, NORMALIZE], MEAN, "mean", True),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, "last", False),
        (None, MEAN, "mean", True),
    ],
)
def test_a_folder_says_how(tmp_path: Path, modules: Any, config: Any, kind: str, normalize: bool) -> None:
    assert rule_of(tmp_path, modules, config) == PoolingRule(kind, normalize, "model")


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert rule_of(tmp_path, None, None) is None
    assert rule_of(tmp_path, [TRANSFORMER], None) is None


@pytest.mark.parametrize(
    "modules,config,words",
    [
        ([TRANSFORMER, POOLING], CLS, "'cls'"),
        ([TRANSFORMER, POOLING], {**CLS, "pooling_mode_max_tokens": True}, "'cls+max'"),
        ([TRANSFORMER, POOLING, DENSE], MEAN, "'Dense'"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_unless_another_is_named(
    tmp_path: Path, modules: Any, config: Any, words: str
) -> None:
    rule = rule_of(tmp_path, modules, config)
    with pytest.raises(QuireError, match=re.escape(words)) as caught:
        choose_pooling(rule, None, None)
    assert (caught.value.code, caught.value.param) == ("unsupported_pooling", "pooling")
    assert choose_pooling(rule, None, "mean").kind == "mean"


def test_broken_files_are_named(tmp_path: Path) -> None:
    for modules in ({"a": 1}, [POOLING], [{**POOLING, "path": "../elsewhere"}], [{**POOLING, "path": "/etc"}]):
        with pytest.raises(QuireError, match=r"modules\.json") as caught:
            rule_of(tmp_path, modules, None)
        assert caught.value.code == "bad_config" and str(tmp_path) not in str(caught.value)
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(QuireError, match=r"modules\.json"):
        rule_of(tmp_path, None, None)


def test_a_gguf_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        metadata: ClassVar[dict[str, Any]] = {}

    monkeypatch.setattr(gguf, "open_gguf", lambda path: Opened)
    files = ModelFiles("gguf", Path("x.gguf"), "x", None)
    for value, kind in ((1, "mean"), (3, "last")):
        Opened.metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": value}
        assert read_pooling(files) == PoolingRule(kind, True, "model")
    Opened.metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": 2}
    assert read_pooling(files).problem  # type: ignore[union-attr]
    for value in (0, None):
        Opened.metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": value}
        assert read_pooling(files) is None


def test_who_goes_first() -> None:
    model = PoolingRule("mean", False, "model")
    assert choose_pooling(model, None, None) is model
    assert choose_pooling(model, "last", None) == PoolingRule("last", False, "server")
    assert choose_pooling(model, "last", "mean") == PoolingRule("mean", False, "request")
    assert choose_pooling(model, None, None, normalize=True) == PoolingRule("mean", True, "model")
    assert choose_pooling(None, None, None) == PoolingRule("last", True, "assumed")


def test_scaling() -> None:
    assert PoolingRule("last", True, "model").scaled([3.0, 4.0]) == [0.6, 0.8]
    assert PoolingRule("last", True, "model").scaled([0.0, 0.0]) == [0.0, 0.0]
    assert PoolingRule("last", False, "model").scaled([3.0, 4.0]) == [3.0, 4.0]
