"""Builds a `Tokenizer` from a Hugging Face model folder: `tokenizer.json` and the small JSON files beside it.

Called through `Tokenizer.from_folder`. `tokenizer.json` takes precedence; the other files add what it can't express:
the names of the special tokens, the chat template, and BOS where no post-processor adds it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.text.pieces import flatten, rule_of_decoder
from quire.text.tokenizer import Tokenizer, TokenizerVocabulary
from quire.types import QuireError

_ADDS_SPECIAL = {"TemplateProcessing", "BertProcessing", "RobertaProcessing"}


def tokenizer_from_folder(path: Path) -> Tokenizer:
    backend = _load_backend(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json")) | _special_tokens(config)
    named_ids = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
    bos_id, eos_id = named_ids.get("bos_token"), named_ids.get("eos_token")
    eos_ids = tuple(
        dict.fromkeys(
            named_ids[name] for name in ("eos_token", "eot_token", "eom_token") if named_ids.get(name) is not None
        )
    )
    added = backend.get_added_tokens_decoder()
    special_ids = {token_id for token_id, token in added.items() if token.special}
    special_ids |= _special_ids_of(config) | set(eos_ids) | ({bos_id} if bos_id is not None else set())
    adds_special = _backend_adds_special(backend)
    vocabulary = TokenizerVocabulary(
        size=max([backend.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added)]),
        rule=rule_of_decoder(backend.decoder),
        token_text=backend.id_to_token,
        special_ids=frozenset(special_ids),
        added_ids=frozenset(added),
        bos_id=bos_id,
        eos_ids=eos_ids,
        special_tokens=special_tokens,
        chat_template=_chat_template(path, config),
        prefix_ids=(bos_id,) if not adds_special and config.get("add_bos_token") and bos_id is not None else (),
        suffix_ids=(eos_id,) if not adds_special and config.get("add_eos_token") and eos_id is not None else (),
    )
    return Tokenizer(backend, vocabulary)


def _load_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        hint = "Quire reads tokenizers in this format only; save the model's fast tokenizer into the folder."
        raise QuireError("no_tokenizer", f"There is no tokenizer.json in {path.parent}.", hint)
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the backend raises nothing narrower
        raise _bad_file(path, str(error)) from None
    backend.no_truncation()  # the file may hold this setting, which would silently cut prompts
    backend.no_padding()
    try:
        backend.encode("Any text \u00e9 will do.")  # some errors in the file appear only here
    except Exception as error:
        raise _bad_file(path, str(error)) from None
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object, empty if there is no file. Raises `bad_tokenizer` for a broken file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _bad_file(path, str(error)) from None
    if not isinstance(content, dict):
        raise _bad_file(path, "it holds no JSON object")
    return content


def _bad_file(path: Path, why: str) -> QuireError:
    return QuireError("bad_tokenizer", f"{path} can't be read: {' '.join(why.split())[:300]}.", "Fetch it again.")


def _special_tokens(content: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and similar; each value is a string or an object with the string as its content."""
    found = {}
    for name, value in content.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str) and _is_text(text):
            found[name] = text
    return found


def _is_text(text: str) -> bool:
    """Whether `text` has a UTF-8 form: JSON can hold half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _special_ids_of(config: dict[str, Any]) -> set[int]:
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return set()
    return {int(k) for k, v in decoder.items() if k.isdigit() and isinstance(v, dict) and v.get("special")}


def _backend_adds_special(backend: Any) -> bool:
    if backend.post_processor is None:
        return False
    steps = flatten(json.loads(backend.post_processor.__getstate__()), "processors")
    return any(step["type"] in _ADDS_SPECIAL for step in steps)


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The chat template: `chat_template.jinja` before the config. Of several named templates "default" is chosen, else
    the first."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _bad_file(file, str(error)) from None
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {t["name"]: t["template"] for t in template if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
