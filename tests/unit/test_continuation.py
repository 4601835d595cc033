"""What the next engine is asked when one fails in the middle of a reply."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import fake_experts

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.errors import ServerError, WrongReplyError
from invrl.gateway.turns.continuation import NotMoved, Segments, joined_spans
from invrl.types.sessions import Sampling
from invrl.types.turns import Segment, VersionSpan
from invrl.types.weights import WeightVersion

PROMPT = [5, 6, 7, 8, 9]
END = 2
DEATH = ServerError("the engine died")
UNKNOWN = 255


def request(**fields: Any) -> GenerateRequest:
    values = {
        "rid": "turn-1",
        "input_ids_T": np.array(PROMPT, np.int32),
        "sampling": Sampling(max_new_tokens=8),
        "stop_token_ids": (END,),
        "path_tokens": 3,
        **fields,
    }
    return GenerateRequest(**values)


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=WeightVersion(version), start=start, end=end)


def chunk(
    ids: list[int], *spans: VersionSpan, cached: int = 0, engine: str | None = None
) -> GenerateChunk:
    return GenerateChunk(
        ids_T=np.array(ids, np.int32),
        logprobs_T=np.full(len(ids), -0.5, np.float32),
        spans=spans or (span(3, 0, len(ids)),),
        cached_tokens=cached,
        engine=engine,
    )


def broken_off(ids: list[int], **fields: Any) -> Segments:
    segments = Segments(request(**fields))
    segments.add(chunk(ids))
    return segments


def after(
    segments: Segments, error: ServerError = DEATH, *, settled: bool = True
) -> GenerateRequest | GenerateEnd | NotMoved:
    return segments.continuation(error, is_text_settled=settled)


def test_next_request_has_the_sampled_tokens_and_the_rest_of_the_budget():
    segments = broken_off([30, 31, 32])
    following = after(segments)
    assert isinstance(following, GenerateRequest)
    assert following.input_ids_T.tolist() == [*PROMPT, 30, 31, 32]
    assert following.input_ids_T.dtype == np.int32
    assert following.sampling.max_new_tokens == 5
    assert following.path_tokens == 3
    assert following.stop_token_ids == (END,)
    assert following.rid == "again-1-turn-1"


def test_no_id_of_a_request_begins_with_that_of_another():
    """SGLang aborts by the beginning of an id."""
    segments = broken_off([30])
    rids = ["turn-1"]
    for _ in range(11):
        following = after(segments)
        assert isinstance(following, GenerateRequest)
        rids.append(following.rid)
    for one, other in itertools.permutations(rids, 2):
        assert not other.startswith(one)


def test_before_the_first_token_the_request_is_sent_again():
    segments = Segments(request(extra_sampling={"json_schema": "{}"}, stop=("x",)))
    following = after(segments, WrongReplyError("another prompt"), settled=False)
    assert isinstance(following, GenerateRequest)
    assert following.input_ids_T.tolist() == PROMPT
    assert following.sampling.max_new_tokens == 8


def test_segments_have_the_versions_of_their_engines():
    segments = broken_off([30, 31])
    after(segments)
    segments.add(chunk([32], span(3, 0, 1)))
    segments.add(chunk([33], span(3, 0, 1), span(4, 1, 2)))
    after(segments)
    segments.add(chunk([34], span(6, 0, 1)))
    assert segments.spans == (span(3, 0, 3), span(4, 3, 4), span(6, 4, 5))
    assert segments.num_segments == 3


def test_segments_name_the_engines_that_sampled_them():
    segments = Segments(request())
    segments.add(chunk([30], engine="engine-0.a"))
    segments.add(chunk([31], span(3, 0, 2), engine="engine-0.a"))
    after(segments)
    after(segments)  # an engine that samples nothing leaves no segment
    segments.add(chunk([32]))
    after(segments)
    segments.add(chunk([33, 34], engine="engine-0.b"))
    assert segments.by_engine == (
        Segment(engine="engine-0.a", start=0, end=2),
        Segment(engine=None, start=2, end=3),
        Segment(engine="engine-0.b", start=3, end=5),
    )


@pytest.mark.parametrize("num_before", [0, 2])
def test_event_without_tokens_begins_no_segment(num_before: int):
    """Two segments with the same start would fail the commit of the turn."""
    segments = Segments(request())
    if num_before:
        segments.add(chunk([30, 31], engine="engine-0.a"))
        after(segments)
    empty = msgspec.structs.replace(chunk([], engine="engine-0.b"), spans=())
    segments.add(empty)
    assert not segments.has_new_tokens
    segments.add(chunk([32], engine="engine-0.b"))
    segments.add(msgspec.structs.replace(empty, spans=(span(3, 0, 1),)))
    starts = [segment.start for segment in segments.by_engine]
    assert starts == sorted({0, num_before})
    assert segments.num_sampled == num_before + 1


def test_reply_that_is_sampled_anew_forgets_the_engines_before():
    segments = Segments(request())
    segments.add(chunk([30, 31], engine="engine-0.a"))
    segments.restart()
    assert segments.by_engine == ()
    segments.add(chunk([32], engine="engine-1.b"))
    assert segments.by_engine == (Segment(engine="engine-1.b", start=0, end=1),)


def test_spans_of_the_tokens_that_follow_are_moved_behind_the_earlier_ones():
    earlier = (span(3, 0, 4), span(4, 4, 6))
    assert joined_spans(earlier, (span(5, 0, 2),)) == (*earlier, span(5, 6, 8))


def test_two_spans_of_one_version_become_one_where_they_meet():
    joined = joined_spans((span(3, 0, 4),), (span(3, 0, 2), span(4, 2, 3)))
    assert joined == (span(3, 0, 6), span(4, 6, 7))
    assert joined_spans((), (span(3, 0, 2),)) == (span(3, 0, 2),)
    assert joined_spans((span(3, 0, 2),), ()) == (span(3, 0, 2),)


def test_cached_tokens_are_those_of_the_first_engine():
    segments = Segments(request())
    segments.add(chunk([30], cached=2))
    after(segments)
    segments.add(chunk([31], cached=6))
    end = GenerateEnd(
        spans=(span(3, 0, 1),),
        finish_reason="stop",
        matched_stop=END,
        cached_tokens=6,
    )
    assert segments.joined(end).cached_tokens == 2


def test_end_token_is_the_end_although_the_engine_did_not_say_so():
    end = after(broken_off([30, END]))
    assert isinstance(end, GenerateEnd)
    assert end.finish_reason == "stop"
    assert end.matched_stop == END
    assert end.spans == (span(3, 0, 2),)


def test_end_token_that_is_ignored_does_not_end_the_reply():
    following = after(broken_off([30, END], ignore_eos=True))
    assert isinstance(following, GenerateRequest)


def test_used_up_budget_ends_the_reply():
    segments = broken_off([30, 31, 32])
    after(segments)
    segments.add(chunk([33, 34, 35, 36, 37]))
    end = after(segments)
    assert isinstance(end, GenerateEnd)
    assert end.finish_reason == "length"
    assert end.matched_stop is None


def test_complete_reply_with_a_grammar_needs_no_further_engine():
    segments = broken_off([30, END], extra_sampling={"json_schema": "{}"})
    assert isinstance(after(segments), GenerateEnd)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"json_schema": "{}"}, NotMoved.GRAMMAR),
        ({"regex": "a+"}, NotMoved.GRAMMAR),
        ({"ebnf": "root ::= x"}, NotMoved.GRAMMAR),
        ({"structural_tag": "{}"}, NotMoved.GRAMMAR),
        ({"frequency_penalty": 0.5}, NotMoved.PARAMETER),
        ({"presence_penalty": 0.5}, NotMoved.PARAMETER),
        ({"repetition_penalty": 1.1}, NotMoved.PARAMETER),
        ({"min_new_tokens": 4}, NotMoved.PARAMETER),
        ({"stop_regex": ["a+"]}, NotMoved.PARAMETER),
        ({"a_later_parameter": 1}, NotMoved.PARAMETER),
    ],
)
def test_reply_whose_tokens_depend_on_more_than_the_ids_is_not_moved(
    parameters: dict, reason: NotMoved
):
    assert after(broken_off([30], extra_sampling=parameters)) is reason


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 5, "min_p": 0.1},
        {"logit_bias": {"7": 1.0}},
        {"sampling_seed": 77},
        {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "json_schema": None},
    ],
)
def test_parameters_of_each_token_alone_move_with_the_reply(parameters: dict):
    following = after(broken_off([30], extra_sampling=parameters))
    assert isinstance(following, GenerateRequest)
    assert following.extra_sampling == parameters


def test_reply_that_may_end_with_half_a_stop_string_is_not_moved():
    assert after(broken_off([30], stop=("END",)), settled=False) is NotMoved.STOP_STRING
    assert isinstance(after(broken_off([30], stop=("END",))), GenerateRequest)
    assert isinstance(after(broken_off([30]), settled=False), GenerateRequest)


def test_tokens_of_an_engine_whose_reply_turns_out_wrong_are_not_continued():
    wrong = WrongReplyError("token id 512 is outside the vocabulary of 512")
    assert after(broken_off([30, END]), wrong) is NotMoved.WRONG_REPLY
    segments = broken_off([30])
    after(segments)
    assert isinstance(after(segments, wrong), GenerateRequest)


def experts(num_rows: int) -> np.ndarray:
    return fake_experts(range(20, 20 + num_rows)).astype(np.uint8)


@pytest.mark.parametrize(("version", "num_lost"), [(3, 0), (4, 2)])
def test_experts_of_tokens_that_other_weights_sampled_are_unknown(
    version: int, num_lost: int
):
    """The last engine reports those of all tokens that no earlier turn has: two of the
    context, two of the first segment, and its own three."""
    segments = broken_off([30, 31])
    after(segments)
    last = chunk([32, 33, END], span(version, 0, 3))
    segments.add(last)
    reported_TLK = experts(7)
    end = GenerateEnd(
        spans=last.spans,
        finish_reason="stop",
        matched_stop=END,
        cached_tokens=0,
        experts_TLK=reported_TLK.copy(),
    )
    joined_TLK = segments.joined(end).experts_TLK
    assert joined_TLK is not None
    known_T = np.ones(7, bool)
    known_T[2 : 2 + num_lost] = False
    assert np.array_equal(joined_TLK[known_T], reported_TLK[known_T])
    assert (joined_TLK[~known_T] == UNKNOWN).all()
