"""Kimi-K3's own config, through the order in which vLLM loads plug-ins and resolves a checkpoint's quantisation."""

from vllm.config import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.weight_utils import get_quant_config

from portamoe.integrations.vllm.config import PortaMxfp4Config
from tests.conftest import DATA


def test_a_kimi_k3_checkpoint_resolves_to_our_class():
    """compressed-tensors, mxfp4-pack-quantized becomes "mxfp4" in vLLM, and "mxfp4" is ours by then."""
    model = EngineArgs(model=str(DATA / "kimi-k3-tiny"), skip_tokenizer_init=True).create_model_config()
    assert model.quantization == "mxfp4"
    assert type(get_quant_config(model, LoadConfig())) is PortaMxfp4Config
