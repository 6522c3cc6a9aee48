"""Published shapes of Mixture-of-Experts models: what of them MoonEP carries and holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "MODELS", "Model"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}


@dataclass(frozen=True)
class Model:
    """The routed experts of a model; shared experts and everything else stay where the tokens are."""

    name: str
    num_experts: int  # E, of a layer
    top_k: int  # K
    hidden: int  # H, the width of a row as it crosses
    width: int  # F, of an expert's hidden layer (SwiGLU and its like: gate, up and down)
    layers: int  # that have routed experts
    bias: bool = False  # on both products
    source: str = ""  # of these constants

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: 3 H F, and with biases 2 F + H more."""
        return 3 * self.hidden * self.width + (2 * self.width + self.hidden if self.bias else 0)

    @property
    def row_flops(self) -> int:
        """Floating-point operations of one row in its expert, forward: two for every weight."""
        return 6 * self.hidden * self.width


MODELS = {
    model.name: model
    for model in (
        # 93 layers, the first dense. Rows have the latent width, not the model's 7168 (LatentMoE, Eq. 11).
        Model("kimi-k3", 896, 16, 3584, 3072, 92, source="Kimi K3 technical report and model config"),
        # num_hidden_layers 61, first_k_dense_replace 1.
        Model("kimi-k2", 384, 8, 7168, 2048, 60, source="config.json of moonshotai/Kimi-K2-Instruct"),
        # num_hidden_layers 61, first_k_dense_replace 3.
        Model("deepseek-v3", 256, 8, 7168, 2048, 58, source="config.json of deepseek-ai/DeepSeek-V3"),
        # decoder_sparse_step 1: every layer has experts.
        Model("qwen3-235b-a22b", 128, 8, 4096, 1536, 94, source="config.json of Qwen/Qwen3-235B-A22B"),
        Model("mixtral-8x7b", 8, 2, 4096, 14336, 32, source="config.json of mistralai/Mixtral-8x7B-v0.1"),
        # GptOssExperts: gate_up_proj_bias and down_proj_bias.
        Model("gpt-oss-120b", 128, 4, 2880, 2880, 36, bias=True, source="config.json of openai/gpt-oss-120b"),
    )
}
