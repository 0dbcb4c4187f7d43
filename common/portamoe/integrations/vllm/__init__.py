"""The vLLM plug-in: portamoe serves the MXFP4 experts that vLLM's quantisation "mxfp4" stands for.

vLLM calls `register` through the entry point `vllm.general_plugins` in every one of its processes. Kimi-K3's checkpoint
resolves to that name; gpt-oss and DeepSeek have names of their own and are not touched. PORTAMOE_VLLM=0 turns it off.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "PORTAMOE_VLLM"
#: A child of vLLM's logger, so that its handlers and levels apply.
LOGGER = "vllm.plugins.portamoe"

_LOG = logging.getLogger(LOGGER)


def register() -> None:
    """Make vLLM ask portamoe first for MXFP4 experts; repeated calls change nothing.

    A vLLM without the classes that are needed keeps its own, with a warning that says what is missing.
    Raises ValueError for a value of $PORTAMOE_VLLM that means nothing.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in {"", "0", "1"}:
        raise ValueError(
            f"{VARIABLE}={value} means nothing; 0 leaves portamoe out, 1 prefers it everywhere, unset decides"
        )
    if value == "0":
        _LOG.info("portamoe is installed and left out: %s=0", VARIABLE)
        return
    try:
        from portamoe.integrations.vllm import config
    except ImportError as error:
        _LOG.warning("portamoe does not know this vLLM and leaves MXFP4 experts to it: %s", error)
        return
    config.register()
