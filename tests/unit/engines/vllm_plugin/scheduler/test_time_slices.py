"""Shares of vLLM's places, by requests that look like vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.host.fair_shares import LONG_ANSWER, QUANTUM
from engines.http import PARAMS_FIELD, with_session
from engines.vllm_plugin.identity import TICKET_FIELD, answer_id_of, marked_id, weight_of
from engines.vllm_plugin.scheduler.time_slices import TimeSlices, tenant_of
from kvstore.session import SessionRef


@dataclass(eq=False)
class Asked:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    session_id: str | None = None
    cache_salt: str | None = None
    lora_request: Any = None
    num_prompt_tokens: int = 20
    num_output_tokens: int = 0


def asked(tenant: str, number: int, weight: int = 1, length: int = 20) -> Asked:
    fields = with_session({}, SessionRef(tenant, f"s{number}", b"salt"))
    answer_id = f"tcm{tenant.encode().hex():0>20}{number:04x}"
    return Asked(
        f"chatcmpl-{marked_id(answer_id, weight)}",  # type: ignore[arg-type]
        fields["kv_transfer_params"],
        num_prompt_tokens=length,
    )


def slices_of(*requests: Asked) -> TimeSlices:
    slices = TimeSlices()
    slices.follow({x.request_id: x for x in requests})
    return slices


def test_tenant_and_weight_are_read_from_the_request() -> None:
    request = asked("alice", 3, weight=12)
    assert (tenant_of(request), weight_of(request.request_id)) == ("alice", 12)
    assert answer_id_of(request.request_id) is not None
    assert weight_of("chatcmpl-another's") == 1
    assert tenant_of(Asked("x", None)) == ""


def test_tenants_go_in_turns_and_each_keeps_its_order() -> None:
    many, few = [asked("many", i) for i in range(4)], [asked("few", i) for i in range(2)]
    slices = slices_of(*many, *few)
    order = slices.ordered([*many, *few], [])
    assert order == [many[0], few[0], many[1], few[1], many[2], many[3]]
    assert slices.ordered([*many[2:], *few], many[:2])[:2] == few


def test_a_short_prompt_goes_before_long_ones_and_keeps_none_waiting_for_ever() -> None:
    long = [asked("a", i, length=2000) for i in range(10)]
    short = [asked("a", 100 + i) for i in range(60)]
    slices = slices_of(*long, *short)
    line, begun = [*long, short[0]], []
    for number in range(40):
        chosen = slices.ordered(line, [])[0]
        slices.count({chosen.request_id: 1})
        begun.append(chosen)
        # More short ones than can ever be served; and vLLM's line is in the order of the last step.
        line = [*short[number + 1 : number + 3], *(x for x in line if x is not chosen)]
    assert begun[0] is short[0]
    assert [x for x in begun if x in long] == long
    assert all(begun.index(x) < 4 * (i + 1) for i, x in enumerate(long))


def test_who_made_way_takes_turns_also_where_another_tenant_is_first() -> None:
    a, b = [asked("a", i) for i in range(3)], [asked("b", i) for i in range(3)]
    slices = slices_of(*a, *b)
    running, waiting = [*a[:2], *b[:2]], [a[2], b[2]]
    slices.count({x.request_id: 1 for x in (*a, *b)})
    slices.count({b[0].request_id: 30})  # ahead by less than a quantum, for ever
    for x in waiting:
        slices.made_way(x)
    for _ in range(int(QUANTUM)):
        assert slices.turn_within(slices.ordered(waiting, running), running) is None
        slices.count({x.request_id: 1 for x in running})
    order = slices.ordered(waiting, running)
    assert order == waiting  # a's is the head
    assert slices.turn_within(order, running) == (a[2], a[0])
    assert slices.turn_within([b[2]], running) == (b[2], b[0])


def test_who_was_served_longest_makes_way_for_another_tenant() -> None:
    running, head = [asked("many", i) for i in range(4)], asked("few", 0)
    own = asked("many", 9)
    slices = slices_of(*running, head, own)
    slices.count({x.request_id: 1 for x in running})
    slices.count({running[2].request_id: 1})
    assert slices.to_yield(head, running) is running[2]
    assert slices.to_yield(own, running) is None
    running.remove(running[2])
    assert slices.to_yield(head, running[:1]) is None


def test_those_that_made_way_take_turns_with_their_own() -> None:
    running, back = [asked("many", i) for i in range(2)], asked("many", 2)
    slices = slices_of(*running, back)
    slices.count({x.request_id: 1 for x in (*running, back)})
    slices.made_way(back)
    assert slices.to_yield(back, running) is None
    slices.count({running[1].request_id: 1})
    for _ in range(int(QUANTUM)):
        slices.count({x.request_id: 1 for x in running})
    assert slices.to_yield(back, running) is running[1]
    slices.made_way(running[1])
    assert slices.to_yield(running[1], [running[0], back]) is None


def test_a_prompt_takes_the_place_of_its_own_tenants_long_answer() -> None:
    running, fresh = [asked("a", i) for i in range(2)], asked("a", 2)
    slices = slices_of(*running, fresh)
    for step in range(int(LONG_ANSWER)):
        assert slices.to_yield(fresh, running) is None, step
        for x in running:
            x.num_output_tokens += 1
        slices.count({x.request_id: 1 for x in running})
    assert slices.to_yield(fresh, running) is running[0]
    assert slices.turn_within([fresh], running) == (fresh, running[0])
    slices.made_way(running[0])
    # It comes back when the short one ends, and is left alone for a quantum.
    slices.count({running[0].request_id: 1, running[1].request_id: 1})
    another = asked("a", 3)
    slices.follow({x.request_id: x for x in (*running, another)})
    for _ in range(2 * int(QUANTUM)):
        slices.count({running[0].request_id: 1})
        if (chosen := slices.to_yield(another, running[:1])) is not None:
            break
    assert chosen is running[0] and slices._runs[running[0].request_id] >= QUANTUM


def test_answers_that_are_not_long_keep_their_places() -> None:
    running, fresh = [asked("a", i) for i in range(2)], asked("a", 2)
    slices = slices_of(*running, fresh)
    for x in running:
        x.num_output_tokens = int(LONG_ANSWER) - 1
    for _ in range(1000):
        slices.count({x.request_id: 1 for x in running})
    assert slices.to_yield(fresh, running) is None


def test_of_four_that_come_in_one_has_not_begun() -> None:
    back, fresh = [asked("a", i) for i in range(5)], [asked("a", 10 + i) for i in range(2)]
    slices = slices_of(*back, *fresh)
    for x in back:
        slices.count({x.request_id: 1})
        slices.made_way(x)
    order = slices.ordered([*fresh, *back], [])
    assert order == [*back[:3], fresh[0], *back[3:], fresh[1]]
    for x in order[:3]:
        slices.count({x.request_id: 1})
    assert slices.ordered(order[3:], order[:3]) == order[3:]


def test_a_measuring_request_is_never_interrupted_and_interrupts_no_other() -> None:
    measuring = Asked("m", {PARAMS_FIELD: {TICKET_FIELD: "t"}})
    users = [asked("a", i) for i in range(2)]
    slices = slices_of(measuring, *users)
    assert slices.to_yield(users[0], [measuring]) is None
    assert slices.to_yield(measuring, users) is None


def test_requests_that_are_gone_are_forgotten() -> None:
    request = asked("a", 0)
    slices = slices_of(request)
    slices.count({request.request_id: 1})
    slices.follow({})
    assert not slices._tenants and not slices._runs
