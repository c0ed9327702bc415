"""Makes what is shown of the gate out of the engine's report on its codecs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from engines.calibration.gate.bound import Bound
from engines.wire import CodecReport
from gateway.live.shape import BoundShown, QualityRow, QualityShown, VerdictShown
from kvstore.codecs.quality import Quality

MAX_VERDICTS: Final = 20


class Verdicts:
    """Remembers what the gate decided, and when; the latest ``MAX_VERDICTS``."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._last: tuple[object, ...] | None = None
        self._heard: deque[VerdictShown] = deque(maxlen=MAX_VERDICTS)

    def hear(self, codec: CodecReport | None) -> list[VerdictShown]:
        """Note the engine's report, if it is another verdict; return all that are known."""
        if codec is None or not codec.id:
            return list(self._heard)
        verdict = (codec.tiers, codec.why, codec.unmeasured)
        if verdict != self._last:
            self._last = verdict
            self._heard.append(
                VerdictShown(
                    at=round(self._wall(), 1),
                    tiers=codec.tiers or {},
                    why=codec.why,
                    measured=not codec.unmeasured,
                    worst_kl=max((x.kl for x in codec.rows), default=None),
                )
            )
        return list(self._heard)


def quality_shown(
    codec: CodecReport | None, can_measure: bool, history: list[VerdictShown]
) -> QualityShown | None:
    """Show the codecs and their measured cost; None while no engine reports it."""
    if codec is None:
        return None
    in_use = {codec.id, *codec.tiers.values()}
    return QualityShown(
        name=codec.name,
        tiers=codec.tiers,
        why=codec.why,
        measured=not codec.unmeasured,
        progress=codec.progress,
        can_measure=can_measure,
        bound=_bound(codec.max_kl) if codec.max_kl is not None else None,
        rows=[_row(x, x.codec_id in in_use) for x in (*codec.rows, *codec.others)],
        history=history,
    )


def prefill_speed(codec: CodecReport | None) -> float | None:
    """Return tokens a second of a prefill, as timed when codecs were measured; None if not."""
    timed = [x.prefill_s for x in codec.rows if x.prefill_s] if codec else []
    return 1000 / max(timed) if timed else None


def _bound(max_kl: float) -> BoundShown:
    bound = Bound(kl=max_kl)
    chain_kl = bound.chain_factor * bound.kl
    return BoundShown(bound.kl, bound.top1, chain_kl, bound.chain_top1)


def _row(row: Quality, in_use: bool) -> QualityRow:
    return QualityRow(
        preset=row.preset,
        codec_id=row.codec_id,
        context=row.context,
        in_use=in_use,
        bits_per_element=row.bits_per_element,
        kl=row.kl,
        top1=row.top1,
        perplexity_change_pct=row.perplexity_change_pct,
        delta_p=row.delta_p,
        needle_found=row.needle_found,
        needle_total=row.needle_total,
        chain_kl=row.chain_kl,
        chain_top1=row.chain_top1,
        chain_delta_p=row.chain_delta_p,
        restore_share=row.restore_share,
        prefill_s=row.prefill_s,
        restore_s=row.restore_s,
    )
