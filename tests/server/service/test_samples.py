"""Several samples of one request, log-probabilities, and what ended a text."""

import asyncio
import threading

import grpc
import pytest

from server.requests import Failure, InboxFull, TokenEvent
from zen.v1 import generate_pb2 as pb
from zen_jax.sampling import TokenLogprobs


def of_sample(messages: list[pb.GenerateResponse], index: int) -> list[pb.GenerateResponse]:
    return [message for message in messages if message.index == index]


async def test_samples_are_requests_of_their_own_and_come_with_their_index(served, worker, ask):
    messages = await served.generate(ask(n=3, seed=9, prompt_logprobs=2, logprobs=1))
    requests = sorted(worker.requests, key=lambda request: request.sample)
    assert [request.sample for request in requests] == [0, 1, 2]
    assert len({request.id for request in requests}) == 3
    assert {request.seed for request in requests} == {9}
    assert len({request.token_ids for request in requests}) == 1
    assert [r.sampling.prompt_logprobs for r in requests] == [2, None, None]
    assert [r.sampling.logprobs for r in requests] == [1, 1, 1]
    for index in range(3):
        own = of_sample(messages, index)
        assert "".join(message.text for message in own) == "Hello"
        assert [m.HasField("completion") for m in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].completion.seed == 9
    assert worker.cancelled == [] and served.service.in_flight == 0


async def test_all_samples_share_the_servers_seed(served, worker, ask):
    await served.generate(ask(n=4))
    assert len({request.seed for request in worker.requests}) == 1


async def test_one_sample_may_go_on_when_another_is_over(served, worker, parts, ask):
    over = threading.Event()

    def script(request, on_event):
        if request.sample == 0:
            over.wait(5)
        on_event(TokenEvent(request.id, f"of {request.sample}", (1,), parts.finish()))

    worker.script = script
    call = served.stub.Generate(ask(n=2))
    first = await call.read()
    assert (first.index, first.text) == (1, "of 1") and first.HasField("completion")
    over.set()
    second = await call.read()
    assert (second.index, second.text) == (0, "of 0") and second.HasField("completion")


async def test_one_samples_failure_ends_the_call_and_frees_the_others(served, worker, ask):
    def script(request, on_event):
        if request.sample == 1:
            on_event(Failure(request.id, "internal", "it broke"))

    worker.script = script
    code, text, _ = await served.refused(ask(n=3))
    assert (code, text) == (grpc.StatusCode.INTERNAL, "it broke")
    ids = {request.id for request in worker.requests if request.sample != 1}
    assert set(worker.cancelled) == ids


async def test_samples_that_do_not_all_fit_leave_none_behind(served, worker, monkeypatch, ask):
    submit = worker.submit

    def full_after_two(request, on_event):
        if request.sample == 2:
            raise InboxFull("2 requests are waiting", 1.0)
        submit(request, on_event)

    worker.script = lambda request, on_event: None
    monkeypatch.setattr(worker, "submit", full_after_two)
    code, _, _ = await served.refused(ask(n=3))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sorted(worker.cancelled) == sorted(request.id for request in worker.requests)
    assert len(worker.cancelled) == 2


async def test_cancelling_frees_every_sample(served, worker, ask):
    worker.script = lambda request, on_event: on_event(TokenEvent(request.id, "x", (1,)))
    call = served.stub.Generate(ask(n=3))
    await call.read()
    call.cancel()
    assert await asyncio.to_thread(worker.cancel_seen.wait, 5)
    for _ in range(1000):
        if len(worker.cancelled) == 3:
            break
        await asyncio.sleep(0.005)  # a poll with an end: the event tells of the first only
    assert sorted(worker.cancelled) == sorted(request.id for request in worker.requests)


async def test_logprobs_go_with_their_tokens(served, worker, parts, ask):
    of_prompt = (TokenLogprobs(1, None), TokenLogprobs(72, -0.5, (72, 3), (-0.5, -2.0)))
    of_first = TokenLogprobs(7, -1.25, (4, 7), (-1.0, -1.25))

    def script(request, on_event):
        on_event(TokenEvent(request.id, "a", (7,), None, (of_first,), of_prompt))
        last = TokenLogprobs(8, -0.75)
        on_event(TokenEvent(request.id, "b", (8,), parts.finish(), (last,)))

    worker.script = script
    messages = await served.generate(ask(logprobs=2, prompt_logprobs=2))
    ids = [i for message in messages for i in message.token_ids]
    own = [entry for message in messages for entry in message.logprobs]
    assert ids == [entry.token_id for entry in own] == [7, 8]
    assert own[0] == pb.TokenLogprobs(
        token_id=7, logprob=-1.25, top_ids=[4, 7], top_logprobs=[-1.0, -1.25]
    )
    assert own[1].logprob == -0.75 and not own[1].top_ids
    prompt = messages[0].prompt_logprobs
    assert [entry.HasField("logprob") for entry in prompt] == [False, True]
    assert list(prompt[1].top_ids) == [72, 3]
    assert all(not message.prompt_logprobs for message in messages[1:])


@pytest.mark.parametrize(
    "token, text", [(5, None), (None, "END")], ids=["by a token", "by a string"]
)
async def test_what_ended_the_text_is_told(served, worker, parts, ask, token, text):
    def script(request, on_event):
        finish = parts.finish("stop", token, text)
        on_event(TokenEvent(request.id, "", (5,), finish))

    worker.script = script
    (message,) = await served.generate(ask(stop=["END"]))
    done = message.completion
    assert done.finish_reason == pb.FINISH_REASON_STOP
    assert done.HasField("matched_stop_token_id") == (token is not None)
    assert done.HasField("matched_stop") == (text is not None)
    assert done.matched_stop == (text or "")
