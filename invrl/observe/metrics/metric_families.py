"""Prometheus metrics of a run: name, kind, labels, unit, meaning and source of each.
Pure.

Invariants: a name, its labels and its unit never change, because users' dashboards and
alerts contain them; a step's measurements are read from its row in `metrics.jsonl`, and
computed nowhere else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All series of one name. A counter starts at 0 with each driver, as in a restarted
    program, except where `help` says otherwise."""

    name: str
    """Without `_total`, which Prometheus adds to a counter."""
    help: str
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    unit: str = ""
    """Unit for people; empty for a plain number."""
    row_key: str = ""
    """Regular expression for names in `metrics.jsonl`. A group in it is the value of
    the only label. A gauge is the newest value, a counter the sum over steps. Empty:
    the value has another source."""

    @property
    def sample_name(self) -> str:
        """Name in queries; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def label_in(self, key: str) -> tuple[str, ...] | None:
        """Return the labels' values for this name of `metrics.jsonl`; None if the
        family does not show it."""
        if not self.row_key:
            return None
        match = re.fullmatch(self.row_key, key)
        return None if match is None else match.groups()


_OF_STEPS = (
    Family(name="invrl_step", help="The newest step that is done", row_key="step"),
    Family(
        name="invrl_steps",
        kind="counter",
        help="Training steps that are done",
        row_key="training_step",
    ),
    Family(
        name="invrl_step_end_timestamp_seconds",
        help="When the newest step was done",
        unit="seconds since 1970",
        row_key="time",
    ),
    Family(
        name="invrl_step_seconds",
        help="Time of the newest step, without its checkpoint",
        unit="seconds",
        row_key="time/step_s",
    ),
    Family(
        name="invrl_phase_seconds",
        kind="counter",
        labels=("phase",),
        help="Time in each phase of a step",
        unit="seconds",
        row_key=r"time/(?!step_s)(?!\w+_per_s)(\w+)_s",
    ),
    Family(
        name="invrl_reward_mean",
        help="Mean reward of a step's rollouts",
        row_key="rollout/reward_mean",
    ),
    Family(
        name="invrl_reward_deviation",
        help="Standard deviation of a step's rewards",
        row_key="rollout/reward_std",
    ),
    Family(
        name="invrl_group_reward_deviation",
        help="Mean over groups of the standard deviation of their rewards; 0: nothing to learn",
        row_key="rollout/group_reward_std",
    ),
    Family(
        name="invrl_held_out_accuracy_ratio",
        labels=("evaluation",),
        help="Accuracy of the newest held-out evaluation",
        unit="0 to 1",
        row_key="eval/(.+)/accuracy",
    ),
    Family(
        name="invrl_held_out_reward_mean",
        labels=("evaluation",),
        help="Mean reward of the newest held-out evaluation",
        row_key="eval/(.+)/reward_mean",
    ),
    Family(
        name="invrl_held_out_loss",
        help="Held-out loss of a run on a file",
        unit="nats per token",
        row_key="eval/loss",
    ),
    Family(
        name="invrl_logprob_gap_mean",
        help="Mean distance of a token's log-prob between engine and trainer",
        unit="nats",
        row_key="train/logprob_gap_mean",
    ),
    Family(
        name="invrl_logprob_gap_max",
        help="Largest distance of a token's log-prob between engine and trainer",
        unit="nats",
        row_key="train/logprob_gap_max",
    ),
    Family(
        name="invrl_kl_approximate",
        help="KL of the policy that sampled to the one that is trained",
        unit="nats per token",
        row_key="train/approx_kl",
    ),
    Family(
        name="invrl_kl_reference",
        help="KL to the frozen reference, if there is one",
        unit="nats per token",
        row_key="train/kl_reference",
    ),
    Family(
        name="invrl_clip_ratio",
        help="Share of trained tokens whose ratio was clipped",
        unit="0 to 1",
        row_key="train/clip_fraction",
    ),
    Family(
        name="invrl_entropy",
        help="Mean entropy of the policy",
        unit="nats per token",
        row_key="train/entropy",
    ),
    Family(name="invrl_loss", help="Loss of the newest step", row_key="train/loss"),
    Family(
        name="invrl_gradient_norm",
        help="Norm of the gradient before clipping",
        row_key="train/grad_norm",
    ),
    Family(
        name="invrl_learning_rate",
        help="Learning rate of the newest step",
        row_key="train/lr",
    ),
    Family(
        name="invrl_rollout_tokens_per_second",
        help="Sampled tokens over the time from a batch's first turn to its last",
        unit="tokens per second",
        row_key="time/rollout_tokens_per_s",
    ),
    Family(
        name="invrl_train_tokens_per_second",
        help="Tokens of a batch's rows, prompts too, over the trainer's time",
        unit="tokens per second",
        row_key="train/tokens_per_s",
    ),
    Family(
        name="invrl_sampled_tokens",
        kind="counter",
        help="Sampled tokens of the rollouts that were trained",
        unit="tokens",
        row_key="rollout/sampled_tokens",
    ),
    Family(
        name="invrl_trained_tokens",
        kind="counter",
        help="Tokens that were trained",
        unit="tokens",
        row_key="train/tokens",
    ),
    Family(
        name="invrl_trained_ratio",
        help="Share of sampled tokens that were trained",
        unit="0 to 1",
        row_key="rollout/trained_fraction",
    ),
    Family(
        name="invrl_truncated_ratio",
        help="Share of a step's rollouts in which a reply was cut",
        unit="0 to 1",
        row_key="rollout/truncated_share",
    ),
    Family(
        name="invrl_response_length_tokens",
        help="Mean number of sampled tokens of a rollout",
        unit="tokens",
        row_key="rollout/response_length",
    ),
    Family(
        name="invrl_staleness_mean",
        help="Mean age of the trained rollouts",
        unit="weight versions",
        row_key="rollout/staleness_mean",
    ),
    Family(
        name="invrl_staleness_max",
        help="Largest age of the trained rollouts",
        unit="weight versions",
        row_key="rollout/staleness_max",
    ),
    Family(
        name="invrl_token_age_mean",
        help="Mean age of the trained tokens",
        unit="weight versions",
        row_key="rollout/token_age_mean",
    ),
    Family(
        name="invrl_token_age_beyond_ratio",
        help="Share of tokens older than --max-staleness",
        unit="0 to 1",
        row_key="rollout/token_age_beyond_share",
    ),
    Family(
        name="invrl_trained_length_over_asked",
        help="Mean length of trained rollouts over that of all that were asked for",
        row_key="buffer/trained_length_ratio",
    ),
    Family(
        name="invrl_weight_version",
        help="Version of the weights that the engines hold",
        row_key="sync/version",
    ),
    Family(
        name="invrl_weight_sync_seconds",
        labels=("phase",),
        help="Time of each phase of the newest weight update",
        unit="seconds",
        row_key=r"sync/(\w+)_s",
    ),
    Family(
        name="invrl_weight_sync_bytes",
        help="Size of the newest weight update",
        unit="bytes",
        row_key="sync/bytes",
    ),
    Family(
        name="invrl_canary_gap_max",
        help="Largest log-prob gap of the canary of the newest weight update",
        unit="nats",
        row_key="sync/canary_max_gap",
    ),
)

_OF_THE_RUN = (
    Family(
        name="invrl_run_info",
        labels=("run", "command", "version"),
        help="1; the labels say which run this is, its command and the version of invrl",
    ),
    Family(name="invrl_steps_wanted", help="Number of steps of the run (--num-steps)"),
    Family(
        name="invrl_driver_start_timestamp_seconds",
        help="When this incarnation of the run began",
        unit="seconds since 1970",
    ),
    Family(name="invrl_phase", labels=("phase",), help="1 for what the run does now"),
    Family(
        name="invrl_phase_start_timestamp_seconds",
        help="When that phase began",
        unit="seconds since 1970",
    ),
    Family(
        name="invrl_staleness_bound",
        help="Batches that are sampled ahead (--max-staleness)",
        unit="weight versions",
    ),
    Family(
        name="invrl_rollouts",
        labels=("state",),
        help="Rollouts in each state that is not an end, now",
    ),
    Family(
        name="invrl_groups",
        labels=("state",),
        help="Groups in each state that is not an end, now",
    ),
    Family(
        name="invrl_rollouts_ended",
        kind="counter",
        labels=("end",),
        help="Rollouts that ended: trained or dropped",
    ),
    Family(
        name="invrl_rollouts_failed",
        kind="counter",
        labels=("reason",),
        help="Rollouts that failed, by reason; those that count with a reward are among them",
    ),
    Family(
        name="invrl_groups_dropped",
        kind="counter",
        labels=("reason",),
        help="Groups that were dropped, by reason",
    ),
    Family(
        name="invrl_checkpoint_timestamp_seconds",
        help="When the newest checkpoint was written",
        unit="seconds since 1970",
    ),
    Family(name="invrl_checkpoint_step", help="Step of the newest checkpoint"),
)

_OF_THE_MACHINE = (
    Family(
        name="invrl_source_up",
        labels=("source",),
        help="1 if this part of the run answered the scrape",
    ),
    Family(
        name="invrl_engines", labels=("state",), help="Engines that are alive or lost"
    ),
    Family(
        name="invrl_engine_restarts",
        kind="counter",
        labels=("engine",),
        help="How often each engine that left was started again",
    ),
    Family(
        name="invrl_disk_free_bytes",
        help="Free space where the run folder is",
        unit="bytes",
    ),
    Family(name="invrl_disk_size_bytes", help="Size of that file system", unit="bytes"),
    Family(
        name="invrl_process_resident_bytes",
        labels=("process",),
        help="Resident memory, with that of the processes below; what they share counts for each",
        unit="bytes",
    ),
)

_OF_THE_GATEWAY = (
    Family(
        name="invrl_gateway_sessions",
        labels=("state",),
        help="Sessions in each state that is not an end",
    ),
    Family(
        name="invrl_gateway_requests",
        kind="counter",
        labels=("worker", "route", "status"),
        help="Requests since the worker's start; status 499: the client left before an answer",
    ),
    Family(
        name="invrl_gateway_request_seconds",
        kind="histogram",
        labels=("worker", "route"),
        help="Time from a request's head to the last byte of its answer, since the worker's start",
        unit="seconds",
    ),
    Family(
        name="invrl_gateway_tokens",
        kind="counter",
        labels=("worker", "kind"),
        help="Tokens of closed sessions since the worker's start, by what became of them",
        unit="tokens",
    ),
    Family(
        name="invrl_gateway_prompt_tokens",
        kind="counter",
        labels=("worker", "kind"),
        help="Prompt tokens of turns since the worker's start: all, and those that an engine had cached",
        unit="tokens",
    ),
    Family(
        name="invrl_gateway_turns_held",
        kind="counter",
        labels=("worker",),
        help="Turns that the gate held and then let pass, since the worker's start",
    ),
    Family(
        name="invrl_gateway_held_seconds",
        kind="counter",
        labels=("worker",),
        help="Time for which the gate held those turns",
        unit="seconds",
    ),
    Family(
        name="invrl_gateway_loop_lag_seconds",
        labels=("worker", "quantile"),
        help="How late the event loop ran what was due, over the last minute; quantile 1 is the maximum",
        unit="seconds",
    ),
    Family(
        name="invrl_gateway_worker_starts",
        kind="counter",
        labels=("worker",),
        help="How often each worker was started since the gateway's start",
    ),
)

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (*_OF_STEPS, *_OF_THE_RUN, *_OF_THE_MACHINE, *_OF_THE_GATEWAY)
}
"""Families by name."""
