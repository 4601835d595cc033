"""The contents of a report in which every text is hostile."""

from scripted_viewer import HOSTILE

from invrl.observe.report_chart import Chart, Line
from invrl.observe.report_page import (
    ChangedSetting,
    FailedReason,
    FailureExample,
    Gain,
    ReportContents,
)

LINE = Line(
    label=HOSTILE,
    steps=[0, 5],
    values=[0.25, 0.75],
    band_steps=[0, 5],
    low=[0.125, 0.5],
    high=[0.5, 1.0],
)
HOSTILE_CONTENTS = ReportContents(
    title=HOSTILE,
    subtitle=HOSTILE,
    state=HOSTILE,
    notes=[HOSTILE, "a\x1b[2J\u202eb"],
    charts=[Chart(title=HOSTILE + '" onload="x', lines=[LINE])],
    gains=[
        Gain(
            name=HOSTILE,
            first_step=0,
            last_step=5,
            before=0.25,
            after=0.75,
            after_interval=(0.625, 0.875),
            gain_interval=(0.375, 0.625),
            num_tasks=8,
        )
    ],
    failures=[
        FailedReason(
            reason=HOSTILE,
            count=3,
            examples=[FailureExample(task_id=HOSTILE, count=2, detail=HOSTILE)],
        )
    ],
    settings=[ChangedSetting(name=HOSTILE, value=HOSTILE, default=HOSTILE)],
    versions=[(HOSTILE, HOSTILE)],
    commands=[(HOSTILE, HOSTILE)],
    log_end=HOSTILE + "</pre></body>",
)
