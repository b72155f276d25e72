"""Sizes of tiny random models of several architectures, and one that none of our rules fits."""

from transformers import LlamaForCausalLM

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.4}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
OPT |= {"init_std": 0.4, "max_position_embeddings": 64}


class HalvedLogits(LlamaForCausalLM):
    """Logits that do not follow from the head and the configuration."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output
