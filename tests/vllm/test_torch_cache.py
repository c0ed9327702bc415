"""A packed cache in transformers: one tiny random model, in the environment that has torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch lives in an environment of its own")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import thermocline  # noqa: E402
from thermocline.torch import BLOCK, PackedCache  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prompt(batch: int = 1, length: int = 300):
    torch.manual_seed(2)
    return torch.randint(1, 97, (batch, length))


def said(model, tokens, cache, **options):
    mask = torch.ones_like(tokens)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None} | options
    return model.generate(tokens, attention_mask=mask, past_key_values=cache, **options)


def test_an_exact_codec_says_the_same(model):
    for batch, options in ((1, {}), (2, {"num_beams": 2})):
        tokens = prompt(batch)
        cache = PackedCache(model.config, "raw")
        plain = said(model, tokens, transformers.DynamicCache(config=model.config), **options)
        assert torch.equal(said(model, tokens, cache, **options), plain)
        assert cache.layers[0].num_packed == BLOCK


def test_a_packed_cache_is_small_and_close(model):
    tokens = prompt(1, 1000)
    plain = transformers.DynamicCache(config=model.config)
    logits = {}
    with torch.no_grad():
        for name, cache in (
            ("plain", plain),
            ("tq8", PackedCache(model.config, "tq8")),
            ("tq2", PackedCache(model.config, thermocline.codec("tq", bits=2))),
        ):
            model(tokens, past_key_values=cache)
            out = model(tokens[:, :1], past_key_values=cache)
            logits[name] = torch.log_softmax(out.logits[0, -1].float(), -1)
    whole = sum(x.keys.nbytes + x.values.nbytes for x in plain.layers)
    assert cache.get_seq_length() == 1001 and cache.nbytes < whole / 3

    def kl(name):
        return float((logits["plain"].exp() * (logits["plain"] - logits[name])).sum())

    assert kl("tq8") < kl("tq2") < 0.1 and kl("tq8") < 1e-3


def test_cropping_packs_nothing_again(model):
    tokens, cache = prompt(1, 400), PackedCache(model.config, "tq3")
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        model(tokens[:, :1], past_key_values=cache)
        before = [
            x.update(*[torch.zeros(1, 2, 0, 32, dtype=torch.bfloat16)] * 2) for x in cache.layers
        ]
        cache.crop(-241)
    assert cache.get_seq_length() == 160
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        nothing = torch.zeros(1, 2, 0, 32, dtype=torch.bfloat16)
        again = layer.update(nothing, nothing)
        assert torch.equal(again[0], keys[:, :, :160]) and torch.equal(again[1], values[:, :, :160])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_what_cannot_be_packed_is_refused(model):
    for name, why in (("tq99", "no codec named"), ("balanced", "needs a profile")):
        with pytest.raises(thermocline.UnknownCodec, match=why):
            PackedCache(model.config, name)
