"""The row of a preset that is well within every bound."""

from kvstore.codecs.quality import Quality

FIGURES = {"bits_per_element": 3.25, "perplexity_change_pct": 0.4, "kl": 0.005, "top1": 0.95}
FIGURES |= {"cos_k": 0.98, "cos_v": 0.98, "error_k": 0.03, "error_v": 0.03}
GOOD = Quality(preset="tq3", context=2048, needle_found=3, needle_total=3, **FIGURES)
