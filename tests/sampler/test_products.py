"""Float32 products on the CPU by oneDNN or MKL (stages/models/products.py): the same numbers to rounding, chosen by the
processor's vendor.
"""

import pytest
import torch

from stages.decoding.lean_decoder import LeanDecoder
from stages.decoding.sampler import Sampler, SamplingParams
from stages.models import products

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")


@pytest.fixture
def vendor(monkeypatch):
    def set_to(name):
        monkeypatch.setattr(products, "vendor", lambda: name)
        products.prefers_onednn.cache_clear()

    yield set_to
    products.prefers_onednn.cache_clear()


@needs_onednn
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64, 300])
def test_products_are_those_of_mm(rows):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, add = (
        torch.randn(*shape, generator=generator) for shape in ((rows, 96), (1301, 96), (1301,), (rows, 1301))
    )
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(products.onednn_linear(x, weight).double(), exact, atol=5e-5, rtol=0)
    torch.testing.assert_close(products.onednn_linear(x, weight, bias).double(), exact + bias, atol=5e-5, rtol=0)
    torch.testing.assert_close(products.Packed(weight)(x).double(), exact, atol=5e-5, rtol=0)
    torch.testing.assert_close(products.Packed(weight, bias)(x, add).double(), exact + bias + add, atol=5e-5, rtol=0)
    # however the rows lie
    assert torch.equal(products.Packed(weight)(x), products.Packed(weight)(x.t().contiguous().t()))


@needs_onednn
def test_the_vendor_decides(vendor):
    for name, chosen in (("AuthenticAMD", True), ("GenuineIntel", False), ("", False)):
        vendor(name)
        assert products.prefers_onednn() == chosen


@needs_onednn
def test_gradients_are_recorded_as_usual(vendor):
    vendor("AuthenticAMD")
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    products.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1))
    with torch.no_grad():
        torch.testing.assert_close(products.linear(x, weight), torch.nn.functional.linear(x, weight))
        assert products.linear(x.double(), weight.double()).dtype == torch.float64


@needs_onednn
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_sampler_draws_alike_on_both(models, prompts, vendor, name):
    found = {}
    for maker in ("AuthenticAMD", "GenuineIntel"):
        vendor(maker)
        out = Sampler(models(name), None, max_batch=4).generate(
            prompts, SamplingParams(max_new_tokens=20), [[i, i + 9] for i in range(len(prompts))]
        )
        found[maker] = [(c.ids, c.logps) for group in out for c in group]
        decoder = LeanDecoder(models(name))
        decoder.refresh()
        assert (decoder.head.packed is not None) == (maker == "AuthenticAMD")
    for (a, p), (b, q) in zip(*found.values()):
        assert a == b
        torch.testing.assert_close(torch.tensor(p), torch.tensor(q), atol=3e-5, rtol=0)
