"""The stages, in the order in which they run: the cheap and fundamental ones first."""

from gpu_check.stage import Stage

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="machine",
            proves="torch reaches the card; what it computes and copies per second; NCCL",
            usual_s=9,
            deadline_s=40,
            smaller="nothing: the card is not empty",
        ),
        Stage(
            name="same_step",
            proves="the trainer's gradients in float32 are Hugging Face's",
            usual_s=50,
            deadline_s=150,
            smaller="nothing: the model is small already; is the card empty?",
        ),
        Stage(
            name="logprobs",
            proves="the trainer's log-probs in bfloat16 are Hugging Face's, as far as bfloat16 goes",
            usual_s=35,
            deadline_s=100,
            smaller="--model small",
        ),
        Stage(
            name="flex",
            proves="attention in one kernel is SDPA's attention; its speed; how often it is compiled",
            usual_s=70,
            deadline_s=150,
            smaller="TIMED_TOKENS in stages/flex.py",
        ),
        Stage(
            name="speed",
            proves="the speed of a training step beside Hugging Face's, where its time goes, its memory",
            usual_s=125,
            deadline_s=200,
            smaller="MICRO_BATCHES in stages/speed.py, or --model small",
        ),
        Stage(
            name="offload",
            proves="training steps with the optimizer in main memory; the card's memory beside our estimate",
            usual_s=40,
            deadline_s=120,
            smaller="--model small",
        ),
        Stage(
            name="experts",
            proves="experts computed together are the experts one by one, and Hugging Face's; their speed",
            usual_s=80,
            deadline_s=150,
            smaller="the shapes in stages/experts.py",
        ),
        Stage(
            name="ipc_arena",
            proves="weights in an arena in GPU memory reach another process whole",
            usual_s=26,
            deadline_s=60,
            smaller="--model small",
        ),
        Stage(
            name="ipc_bucket",
            proves="SGLang's buckets by CUDA IPC reach another process whole, and memory does not grow",
            usual_s=37,
            deadline_s=60,
            smaller="NUM_TENSORS in stages/ipc_bucket.py",
        ),
        Stage(
            name="engine",
            proves="an engine computes as the trainer; its weights change under load, and nothing fails",
            usual_s=125,
            deadline_s=180,
            smaller="--model small, or a lower mem_fraction_static in settings.py",
        ),
        Stage(
            name="loop",
            proves="`invrl train` as a whole",
            usual_s=130,
            deadline_s=170,
            smaller="a lower mem_fraction_static in settings.py",
        ),
        Stage(
            name="colocate",
            proves="`invrl train --colocate`: engine and trainer take turns with the card",
            usual_s=105,
            deadline_s=170,
            smaller="a lower mem_fraction_static in settings.py",
        ),
    )
}
