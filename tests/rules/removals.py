"""All removals: for every rule in every row of docs/security.md, how it is taken away and the test that must fail then.

`tests/pure/test_security.py` checks that the list fits the sources and the page; `__main__` does the removing.
"""

from __future__ import annotations

from tests.rules.agent_removals import AGENT_REMOVALS
from tests.rules.engine_removals import ENGINE_REMOVALS
from tests.rules.http_removals import HTTP_REMOVALS
from tests.rules.text_removals import TEXT_REMOVALS

REMOVALS = (*TEXT_REMOVALS, *HTTP_REMOVALS, *ENGINE_REMOVALS, *AGENT_REMOVALS)
