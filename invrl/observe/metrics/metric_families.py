"""Prometheus metrics of a run: name, kind, labels, unit, meaning and source of each.
Pure.

Invariants: a name, its labels and its unit never change, because users' dashboards and
alerts contain them; a step's measurements are read from its row in `metrics.jsonl`, and
computed nowhere else.
"""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name. A counter starts at 0 with each driver, as in a restarted
    program, except where `help` says otherwise."""

    name: str
    """Without `_total`, which Prometheus adds to a counter."""
    help: str
    _: KW_ONLY
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    unit: str = ""
    """Unit for people; empty for a plain number."""
    row_key: str = ""
    """Regular expression for names in `metrics.jsonl`. A group in it is the value of
    the only label. A gauge is the newest value, a counter the sum over steps. Empty:
    the value has another source."""

    def label_in(self, key: str) -> tuple[str, ...] | None:
        """Return the labels' values for this name of `metrics.jsonl`; None if the
        family does not show it."""
        if not self.row_key:
            return None
        match = re.fullmatch(self.row_key, key)
        return None if match is None else match.groups()


_OF_STEPS = (
    Family("invrl_step", "The newest step that is done", row_key="step"),
    Family(
        "invrl_steps",
        "Training steps that are done",
        kind="counter",
        row_key="training_step",
    ),
    Family(
        "invrl_step_end_timestamp_seconds",
        "When the newest step was done",
        unit="seconds since 1970",
        row_key="time",
    ),
    Family(
        "invrl_step_seconds",
        "Time of the newest step, without its checkpoint",
        unit="seconds",
        row_key="time/step_s",
    ),
    Family(
        "invrl_phase_seconds",
        "Time in each phase of a step",
        kind="counter",
        labels=("phase",),
        unit="seconds",
        row_key=r"time/(?!step_s)(?!\w+_per_s)(\w+)_s",
    ),
    Family(
        "invrl_reward_mean",
        "Mean reward of a step's rollouts",
        row_key="rollout/reward_mean",
    ),
    Family(
        "invrl_reward_deviation",
        "Standard deviation of a step's rewards",
        row_key="rollout/reward_std",
    ),
    Family(
        "invrl_group_reward_deviation",
        "Mean over groups of the standard deviation of their rewards; 0: nothing to learn",
        row_key="rollout/group_reward_std",
    ),
    Family(
        "invrl_held_out_accuracy_ratio",
        "Accuracy of the newest held-out evaluation",
        labels=("evaluation",),
        unit="0 to 1",
        row_key="eval/(.+)/accuracy",
    ),
    Family(
        "invrl_held_out_reward_mean",
        "Mean reward of the newest held-out evaluation",
        labels=("evaluation",),
        row_key="eval/(.+)/reward_mean",
    ),
    Family(
        "invrl_held_out_loss",
        "Held-out loss of a run on a file",
        unit="nats per token",
        row_key="eval/loss",
    ),
    Family(
        "invrl_logprob_gap_mean",
        "Mean distance of a token's log-prob between engine and trainer",
        unit="nats",
        row_key="train/logprob_gap_mean",
    ),
    Family(
        "invrl_logprob_gap_max",
        "Largest distance of a token's log-prob between engine and trainer",
        unit="nats",
        row_key="train/logprob_gap_max",
    ),
    Family(
        "invrl_kl_approximate",
        "KL of the policy that sampled to the one that is trained",
        unit="nats per token",
        row_key="train/approx_kl",
    ),
    Family(
        "invrl_kl_reference",
        "KL to the frozen reference, if there is one",
        unit="nats per token",
        row_key="train/kl_reference",
    ),
    Family(
        "invrl_clip_ratio",
        "Share of trained tokens whose ratio was clipped",
        unit="0 to 1",
        row_key="train/clip_fraction",
    ),
    Family(
        "invrl_entropy",
        "Mean entropy of the policy",
        unit="nats per token",
        row_key="train/entropy",
    ),
    Family("invrl_loss", "Loss of the newest step", row_key="train/loss"),
    Family(
        "invrl_gradient_norm",
        "Norm of the gradient before clipping",
        row_key="train/grad_norm",
    ),
    Family(
        "invrl_learning_rate", "Learning rate of the newest step", row_key="train/lr"
    ),
    Family(
        "invrl_rollout_tokens_per_second",
        "Sampled tokens over the time from a batch's first turn to its last",
        unit="tokens per second",
        row_key="time/rollout_tokens_per_s",
    ),
    Family(
        "invrl_train_tokens_per_second",
        "Tokens of a batch's rows, prompts too, over the trainer's time",
        unit="tokens per second",
        row_key="train/tokens_per_s",
    ),
    Family(
        "invrl_sampled_tokens",
        "Sampled tokens of the rollouts that were trained",
        kind="counter",
        unit="tokens",
        row_key="rollout/sampled_tokens",
    ),
    Family(
        "invrl_trained_tokens",
        "Tokens that were trained",
        kind="counter",
        unit="tokens",
        row_key="train/tokens",
    ),
    Family(
        "invrl_trained_ratio",
        "Share of sampled tokens that were trained",
        unit="0 to 1",
        row_key="rollout/trained_fraction",
    ),
    Family(
        "invrl_truncated_ratio",
        "Share of a step's rollouts in which a reply was cut",
        unit="0 to 1",
        row_key="rollout/truncated_share",
    ),
    Family(
        "invrl_response_length_tokens",
        "Mean number of sampled tokens of a rollout",
        unit="tokens",
        row_key="rollout/response_length",
    ),
    Family(
        "invrl_staleness_mean",
        "Mean age of the trained rollouts",
        unit="weight versions",
        row_key="rollout/staleness_mean",
    ),
    Family(
        "invrl_staleness_max",
        "Largest age of the trained rollouts",
        unit="weight versions",
        row_key="rollout/staleness_max",
    ),
    Family(
        "invrl_token_age_mean",
        "Mean age of the trained tokens",
        unit="weight versions",
        row_key="rollout/token_age_mean",
    ),
    Family(
        "invrl_token_age_beyond_ratio",
        "Share of tokens older than --max-staleness",
        unit="0 to 1",
        row_key="rollout/token_age_beyond_share",
    ),
    Family(
        "invrl_trained_length_over_asked",
        "Mean length of trained rollouts over that of all that were asked for",
        row_key="buffer/trained_length_ratio",
    ),
    Family(
        "invrl_weight_version",
        "Version of the weights that the engines hold",
        row_key="sync/version",
    ),
    Family(
        "invrl_weight_sync_seconds",
        "Time of each phase of the newest weight update",
        labels=("phase",),
        unit="seconds",
        row_key=r"sync/(\w+)_s",
    ),
    Family(
        "invrl_weight_sync_bytes",
        "Size of the newest weight update",
        unit="bytes",
        row_key="sync/bytes",
    ),
    Family(
        "invrl_canary_gap_max",
        "Largest log-prob gap of the canary of the newest weight update",
        unit="nats",
        row_key="sync/canary_max_gap",
    ),
)

_OF_THE_RUN = (
    Family(
        "invrl_run_info",
        "1; the labels say which run this is, its command and the version of invrl",
        labels=("run", "command", "version"),
    ),
    Family("invrl_steps_wanted", "Number of steps of the run (--num-steps)"),
    Family(
        "invrl_driver_start_timestamp_seconds",
        "When this incarnation of the run began",
        unit="seconds since 1970",
    ),
    Family("invrl_phase", "1 for what the run does now", labels=("phase",)),
    Family(
        "invrl_phase_start_timestamp_seconds",
        "When that phase began",
        unit="seconds since 1970",
    ),
    Family(
        "invrl_staleness_bound",
        "Batches that are sampled ahead (--max-staleness)",
        unit="weight versions",
    ),
    Family(
        "invrl_rollouts",
        "Rollouts in each state that is not an end, now",
        labels=("state",),
    ),
    Family(
        "invrl_groups",
        "Groups in each state that is not an end, now",
        labels=("state",),
    ),
    Family(
        "invrl_rollouts_ended",
        "Rollouts that ended: trained or dropped",
        kind="counter",
        labels=("end",),
    ),
    Family(
        "invrl_rollouts_failed",
        "Rollouts that failed, by reason; those that count with a reward are among them",
        kind="counter",
        labels=("reason",),
    ),
    Family(
        "invrl_groups_dropped",
        "Groups that were dropped, by reason",
        kind="counter",
        labels=("reason",),
    ),
    Family(
        "invrl_checkpoint_timestamp_seconds",
        "When the newest checkpoint was written",
        unit="seconds since 1970",
    ),
    Family("invrl_checkpoint_step", "Step of the newest checkpoint"),
)

_OF_THE_MACHINE = (
    Family(
        "invrl_source_up",
        "1 if this part of the run answered the scrape",
        labels=("source",),
    ),
    Family("invrl_engines", "Engines that are alive or lost", labels=("state",)),
    Family(
        "invrl_engine_restarts",
        "How often each engine that left was started again",
        kind="counter",
        labels=("engine",),
    ),
    Family("invrl_disk_free_bytes", "Free space where the run folder is", unit="bytes"),
    Family("invrl_disk_size_bytes", "Size of that file system", unit="bytes"),
    Family(
        "invrl_process_resident_bytes",
        "Resident memory, with that of the processes below; what they share counts for each",
        labels=("process",),
        unit="bytes",
    ),
)

_OF_THE_GATEWAY = (
    Family(
        "invrl_gateway_sessions",
        "Sessions in each state that is not an end",
        labels=("state",),
    ),
    Family(
        "invrl_gateway_requests",
        "Requests since the worker's start; status 499: the client left before an answer",
        kind="counter",
        labels=("worker", "route", "status"),
    ),
    Family(
        "invrl_gateway_request_seconds",
        "Time from a request's head to the last byte of its answer, since the worker's start",
        kind="histogram",
        labels=("worker", "route"),
        unit="seconds",
    ),
    Family(
        "invrl_gateway_tokens",
        "Tokens of closed sessions since the worker's start, by what became of them",
        kind="counter",
        labels=("worker", "kind"),
        unit="tokens",
    ),
    Family(
        "invrl_gateway_prompt_tokens",
        "Prompt tokens of turns since the worker's start: all, and those that an engine had cached",
        kind="counter",
        labels=("worker", "kind"),
        unit="tokens",
    ),
    Family(
        "invrl_gateway_turns_held",
        "Turns that the gate held and then let pass, since the worker's start",
        kind="counter",
        labels=("worker",),
    ),
    Family(
        "invrl_gateway_held_seconds",
        "Time for which the gate held those turns",
        kind="counter",
        labels=("worker",),
        unit="seconds",
    ),
    Family(
        "invrl_gateway_loop_lag_seconds",
        "How late the event loop ran what was due, over the last minute; quantile 1 is the maximum",
        labels=("worker", "quantile"),
        unit="seconds",
    ),
    Family(
        "invrl_gateway_worker_starts",
        "How often each worker was started since the gateway's start",
        kind="counter",
        labels=("worker",),
    ),
)

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (*_OF_STEPS, *_OF_THE_RUN, *_OF_THE_MACHINE, *_OF_THE_GATEWAY)
}
"""Families by name."""
