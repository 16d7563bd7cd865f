"""Opens the engine that `quire chat` talks to: a server by `--url`, or a model in this process."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from quire.agent.engines.local import LocalEngine
from quire.agent.engines.remote import RemoteEngine
from quire.agent.engines.seam import ChatEngine
from quire.cli.agent_chat.flags import api_key
from quire.cli.model_argument import take_positional_model
from quire.cli.run import OpenLLM, short_name
from quire.config_build import config_from_args


@contextmanager
def open_engine(args: Namespace, open_llm: OpenLLM) -> Iterator[ChatEngine]:
    args = take_positional_model(args)
    if args.url is not None:
        in_prompt = vars(args).get("tools_in_prompt", False)
        yield RemoteEngine(args.url, model=vars(args).get("model"), api_key=api_key(args), takes_tools=not in_prompt)
        return
    config = config_from_args(args)
    with open_llm(config) as llm:
        yield LocalEngine(llm, short_name(config))
