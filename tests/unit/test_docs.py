"""The documentation: the site builds without a warning and loads nothing from another
host; every snippet parses or resolves; every flag, file and command that a page names
exists."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples
from invrl.algorithms.objectives.example import example_inputs
from invrl.algorithms.objectives.objectives import check_outputs
from invrl.cli import main as cli
from invrl.cli.flags import SETTING_FLAGS, parse_flags
from invrl.errors import SessionError
from invrl.rollout.tasks.source_check import check_feedback
from invrl.run.settings.config import SECTIONS, TABLES, UPSTREAM, Source, resolve
from invrl.types.groups import Group, GroupOutcome, TaskHistory
from invrl.types.weights import WeightVersion
from invrl.user_code.plugins import takes_history

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "rollout_fns" / "README.md",
    ROOT / "rollout_fns" / "your_task" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
OTHER_PROGRAM = "<!-- other program -->"
"""Stands before a TOML block that is not a configuration of ours."""
CONFIG_COMMANDS = ("train", "serve", "eval", "doctor", "show-config")
OTHER_PROGRAMS = (
    "ray",
    "cd",
    "curl",
    "export",
    "pip",
    "python",
    "cp",
    "mkdir",
    "hf",
    "tensorboard",
    "git",
)
"""Commands of a shell snippet that are not ours."""


CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""The changelog also names what is gone."""
SCRIPTS = (ROOT / "tests/soak.py", *sorted(ROOT.glob("benchmarks/*.py")))
"""Programs of the checkout whose flags the pages show."""


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    is_ours: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_of(page: Path) -> Iterator[Snippet]:
    lines = page.read_text().splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        language = lines[opened].strip().removeprefix("```").strip()
        before = lines[opened - 1].strip() if opened else ""
        yield Snippet(
            page=page_name(page),
            line=opened + 1,
            language=language,
            text="\n".join(lines[opened + 1 : number]) + "\n",
            is_ours=before != OTHER_PROGRAM,
        )
        opened = None
    assert opened is None, (
        f"{page_name(page)}:{(opened or 0) + 1}: the block has no end"
    )


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]


def of_language(*languages: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language in languages]


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )


# ----------------------------------------------------------------- the site


class LoadedResources(HTMLParser):
    """The addresses that a browser fetches by itself when it shows the page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.addresses.append(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") != "canonical":
            self.addresses.append(attributes.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. MkDocs is strict: a warning is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    warnings: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    finally:
        logger.removeHandler(handler)
    assert warnings == []
    return folder


def test_documentation_site_has_every_page(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file(), page
    assert (site / "reference" / "settings.html").is_file(), (
        "generated while the site is built"
    )


def test_no_documentation_page_loads_files_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        parser = LoadedResources()
        parser.feed(page.read_text())
        assert [address for address in parser.addresses if "//" in address] == [], page
        for address in parser.addresses:
            if not address or address.startswith(("data:", "/")):
                continue
            assert (page.parent / address.partition("?")[0]).exists(), (
                f"{page.name}: {address}"
            )
    for sheet in site.rglob("*.css"):
        addresses = re.findall(
            r"(?:url\(|@import )['\"]?(https?:)?//", sheet.read_text()
        )
        assert addresses == [], sheet


def test_settings_reference_lists_every_setting(site: Path) -> None:
    page = (site / "reference" / "settings.html").read_text()
    for table in (*SECTIONS, *TABLES):
        assert f'id="{table}"' in page
    for setting in SETTING_FLAGS:
        if setting.key:
            assert f"<code>{setting.key}</code>" in page, setting.name
            assert f"<code>{setting.flag}</code>" in page, setting.name


def test_first_paragraph_of_every_settings_section_is_sentences() -> None:
    """The reference and `invrl train --help` show it as the section's summary."""
    sections = SECTIONS | {name: table.model for name, table in TABLES.items()}
    for table, section in sections.items():
        summary, _, _ = (section.__doc__ or "").partition("\n\n")
        assert summary.strip().endswith("."), table


# ----------------------------------------------------------------- snippets


def test_every_snippet_names_its_language() -> None:
    known = {"python", "toml", "bash", "json", "jsonl", "text"}
    for snippet in SNIPPETS:
        if snippet.page == "ARCHITECTURE.md" and not snippet.language:
            continue  # diagrams
        assert snippet.language in known, f"{snippet.place}: {snippet.language!r}"


@pytest.mark.parametrize(
    "snippet", of_language("python"), ids=lambda snippet: snippet.place
)
def test_python_snippets_compile_and_their_imports_exist(snippet: Snippet) -> None:
    tree = ast.parse(snippet.text, snippet.place)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module.split(".")[0] not in ("invrl", "rollout_fns"):
            continue
        imported = importlib.import_module(module)
        for alias in node.names:
            is_submodule = (
                importlib.util.find_spec(f"{module}.{alias.name}")
                if hasattr(imported, "__path__")
                else None
            )
            assert hasattr(imported, alias.name) or is_submodule, (
                f"{snippet.place}: {module}.{alias.name}"
            )


@pytest.mark.parametrize(
    "snippet",
    [s for s in of_language("toml") if s.is_ours],
    ids=lambda snippet: snippet.place,
)
def test_toml_snippets_resolve_as_configuration(snippet: Snippet) -> None:
    resolve(Source(name=snippet.place, tables=tomllib.loads(snippet.text)))


def test_dialect_example_of_the_docs_reads_requests_and_writes_replies() -> None:
    [snippet] = [
        snippet
        for snippet in of_language("python")
        if snippet.page == "docs/extend/dialect.md"
    ]
    module: dict[str, Any] = {}
    exec(compile(snippet.text, snippet.place, "exec"), module)
    dialect = module["AskDialect"](model="tiny", vocab_size=512, token_text=str)
    request = dialect.parse(
        b'{"model": "tiny", "question": "Well?", "stream": true}', retry=False
    )
    assert [message.content for message in request.turn.messages] == ["Well?"]
    assert request.turn.stream
    for refused in (
        b'{"model": "tiny", "question": ""}',
        b'{"model": "tiny", "question": "x", "images": [1]}',
    ):
        with pytest.raises(SessionError) as caught:
            dialect.parse(refused, retry=False)
        assert caught.value.status == 400
        assert b"error" in dialect.error(caught.value)
    assert json.loads(dialect.stream(request, []).tail([])) == {"done": True}


def test_loss_examples_of_the_docs_compute_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snippet, of_group, with_settings = [
        snippet
        for snippet in of_language("python")
        if snippet.page == "docs/extend/loss.md"
    ]
    module: dict[str, Any] = {}
    exec(compile(snippet.text, snippet.place, "exec"), module)
    ratio_N = torch.ones(3, requires_grad=True)
    advantages_N = torch.tensor([1.0, -1.0, 0.0])
    losses_N = module["soft_clip"](
        ratio_N, advantages_N, eps_clip_low=0.2, eps_clip_high=0.2
    )
    losses_N.sum().backward()
    assert torch.equal(losses_N.detach(), -advantages_N)
    assert torch.allclose(ratio_N.grad, -advantages_N)
    example = example_inputs()
    far_N = module["anchored"](
        torch.ones(9),
        example.advantages_N,
        eps_clip_low=0.2,
        eps_clip_high=1e-6,
        inputs=example,
    )
    assert not far_N.any(), "every row is further away than that"
    near_N = module["anchored"](
        torch.ones(9),
        example.advantages_N,
        eps_clip_low=0.2,
        eps_clip_high=9.0,
        inputs=example,
    )
    assert torch.equal(near_N, -example.advantages_N)
    ranks_G = module["ranks"](np.array([0.0, 5.0, 5.0, 100.0]), eps=1e-4)
    assert ranks_G.tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert module["ranks"](np.array([2.0]), eps=1e-4).tolist() == [0.0]
    exec(compile(of_group.text, of_group.place, "exec"), module)
    group = SimpleNamespace(
        rollouts_G=[
            SimpleNamespace(numbers={"score": 3.0}),
            SimpleNamespace(numbers={}),
        ]
    )
    above_score = module["above_score"]
    assert above_score(np.array([3.0, 2.0]), eps=1e-4, group=group).tolist() == [
        -1.0,
        1.0,
    ]
    assert above_score(np.array([3.0, 2.0]), eps=1e-4).tolist() == [0.5, -0.5]
    my_soft_loss = ModuleType("my_soft_loss")
    monkeypatch.setitem(sys.modules, "my_soft_loss", my_soft_loss)
    exec(compile(with_settings.text, with_settings.place, "exec"), vars(my_soft_loss))
    soft_loss = vars(my_soft_loss)["SoftLoss"](width=0.5)
    token_losses = soft_loss(
        SimpleNamespace(
            ratio_N=torch.tensor([1.0, 1.0, 9.0]), advantages_N=advantages_N
        )
    )
    assert torch.equal(token_losses.losses_N, -advantages_N)
    assert token_losses.means["far"].tolist() == [False, False, True]


def test_objective_example_of_the_docs_adds_up_over_micro_batches() -> None:
    """A rollout of two rows, in one call and in two."""
    [snippet] = [
        snippet
        for snippet in of_language("python")
        if snippet.page == "docs/extend/objective.md"
    ]
    module: dict[str, Any] = {}
    exec(compile(snippet.text, snippet.place, "exec"), module)
    objective = module["towards_the_reference"]
    assert objective.needs.reference
    sample_N = torch.tensor([0, 0, 1])
    current_N = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    entropy_N = torch.tensor([0.5, 0.25, 1.0], requires_grad=True)
    reference_N = torch.tensor([-1.5, -2.0, -1.0])

    def call(tokens: slice) -> torch.Tensor:
        rows_of_part = sample_N[tokens] - sample_N[tokens][0]
        tokens_R = torch.bincount(rows_of_part).float()
        rows = Samples(
            sample_N=rows_of_part,
            tokens_R=tokens_R,
            rollout_tokens_R=torch.full_like(tokens_R, 3.0),
            group_tokens_R=torch.full_like(tokens_R, 3.0),
        )
        inputs = LossInputs(
            current_N=current_N[tokens],
            entropy_N=entropy_N[tokens],
            samples=rows,
            denominators=Denominators(tokens=3, samples=2, rollouts=1, groups=1),
            old_N=None,
            rollout_N=torch.zeros_like(reference_N[tokens]),
            advantages_N=torch.zeros_like(reference_N[tokens]),
            reference_N=reference_N[tokens],
        )
        outputs = objective(inputs)
        check_outputs("towards_the_reference", outputs)
        return outputs.loss

    expected = (0.25 + 4.0 - 0.01 * 1.75) / 3
    assert call(slice(None)).item() == pytest.approx(expected)
    assert (call(slice(0, 2)) + call(slice(2, 3))).item() == pytest.approx(expected)


def test_filter_and_task_source_examples_of_the_docs_work() -> None:
    filters, source = (
        python_snippet
        for python_snippet in of_language("python")
        if python_snippet.page == "docs/extend/tasks.md"
    )
    module: dict[str, Any] = {}
    for snippet in (filters, source):
        exec(compile(snippet.text, snippet.place, "exec"), module)

    def ended(task_id: str, num_solved: int) -> GroupOutcome:
        rewards_G = (1.0,) * num_solved + (0.0,) * (4 - num_solved)
        return GroupOutcome(
            task_id=task_id,
            group_id="g",
            version=WeightVersion(0),
            rewards_G=rewards_G,
            num_solved=num_solved,
            complete=True,
        )

    group = Group(id="g", task_id="t", rollouts_G=())
    for solved, verdict in (
        ([4, 4], "solved_twice"),
        ([4, 3], None),
        ([4], None),
        ([0, 4, 4], "solved_twice"),
    ):
        history = TaskHistory(
            task_id="t", recent=tuple(ended("t", count) for count in solved)
        )
        assert module["not_again"](group, history=history) == verdict
    assert takes_history(module["not_again"])

    check_feedback("my_tasks:levels", lambda: module["levels"]("train", 3))
    tasks = module["levels"]("train", 3)
    for _ in range(19):
        tasks.record(ended(next(tasks).id, 4))
    restored = module["levels"]("train", 3)
    restored.restore(tasks.state())
    last_easy = next(restored)
    assert last_easy == next(tasks)
    assert last_easy.id.startswith("1-")
    restored.record(ended(last_easy.id, 4))
    assert next(restored).id.startswith("2-")
    assert len({task.id for task in module["levels"]("eval", 3)}) == 50


def test_json_snippets_parse() -> None:
    for snippet in of_language("json"):
        json.loads(snippet.text)
    for snippet in of_language("jsonl"):
        for line in snippet.text.splitlines():
            json.loads(line)
    for snippet in of_language("toml"):
        tomllib.loads(snippet.text)


def command_lines(snippet: Snippet) -> Iterator[list[str]]:
    """The commands of a shell snippet as lists of words, without comments."""
    joined = snippet.text.replace("\\\n", " ")
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages' command lines name."""
    settings = ROOT / "rollout_fns" / "your_task" / "my_task.toml"
    (tmp_path / "my_task.toml").write_text(settings.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_command(
    words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`words` after `invrl`: the command exists, and takes these flags."""
    if not words or words[0] in ("--version", "--help"):
        return
    command = words[0]
    arguments = words[1:]
    capsys.readouterr()
    assert cli.main([command, "--help"]) == 0, f"{place}: there is no `invrl {command}`"
    help_text = capsys.readouterr().out
    if command in CONFIG_COMMANDS:
        own = {"--cluster", "--json", "--minutes", "--out"} & set(
            re.findall(r"--[\w-]+", help_text.partition("sources:")[0])
        )
        kept: list[str] = []
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word not in own:
                kept.append(word)
            elif rest and not rest[0].startswith("--"):
                rest.pop(0)
        parse_flags(
            kept, command="train" if command in ("show-config", "doctor") else command
        )
        return
    for word in arguments:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text), (
                f"{place}: {command} {flag}"
            )


@pytest.mark.parametrize(
    "snippet", of_language("bash"), ids=lambda snippet: snippet.place
)
def test_shell_snippets_parse(
    snippet: Snippet, reader_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=snippet.text, text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    for words in command_lines(snippet):
        program = words[0]
        arguments = words[1:]
        arguments = [word for word in arguments if word != "..."]
        if program.removeprefix(".venv/bin/") == "invrl":
            check_command(arguments, snippet.place, capsys)
        elif program.startswith("./") or program.startswith(".venv/bin/"):
            assert (ROOT / program).is_file(), f"{snippet.place}: {program}"
        else:
            assert program in OTHER_PROGRAMS, f"{snippet.place}: {program}"
            if program == "python" and arguments[0].startswith("tests/"):
                assert (ROOT / arguments[0]).is_file(), (
                    f"{snippet.place}: {arguments[0]}"
                )


# --------------------------------------------------------------- what the prose names


def known_flags(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Every flag of every command, as their help texts show them."""
    flags = {"--version", "--help", "--strict"}
    flags |= {
        setting.negative_flag for setting in SETTING_FLAGS if setting.negative_flag
    }
    for command in cli.COMMANDS:
        capsys.readouterr()
        cli.main([command, "--help"])
        flags |= set(re.findall(r"--[a-z][\w.-]*\w", capsys.readouterr().out))
    for script in SCRIPTS:
        flags |= set(re.findall(r"--[a-z][\w.-]*\w", script.read_text()))
    return flags


FLAGS_OF_OTHERS = {"--shm-size", "--local-dir", "--all"}
"""Flags of other programs that pages name."""


def test_every_flag_that_a_page_names_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = known_flags(capsys) | FLAGS_OF_OTHERS
    passed_on = ("--plugin.", *(f"--{package}-" for package in UPSTREAM))
    for page in CURRENT_PAGES:
        for code in re.findall(r"`([^`]+)`", prose_of(page)):
            if "tests/" in code:
                continue  # a script beside the tests has flags of its own
            for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", code):
                if f"{flag}-".startswith(passed_on):
                    continue
                assert flag in flags, f"{page_name(page)}: `{code}`"


def test_every_file_that_a_page_names_exists() -> None:
    folders = "invrl|benchmarks|tests|launch|rollout_fns|docs"
    for page in CURRENT_PAGES:
        for name in re.findall(rf"`((?:{folders})/[\w./-]*\w/?)`", prose_of(page)):
            assert (ROOT / name).exists(), f"{page_name(page)}: `{name}`"


def test_architecture_map_answers_every_question_with_a_file_of_the_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("## Where is ...?")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    for row in rows:
        assert re.search(r"`invrl/[\w/.]+`", row), row


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    """On a code host nothing is generated. MkDocs checks the anchors."""
    for target in re.findall(r"\]\(([^)]+)\)", prose_of(page)):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_every_command_is_on_the_page_of_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (DOCS / "reference" / "commands.md").read_text()
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command in overview
        assert f"| `invrl {command}` |" in page, command


def test_every_failure_reason_is_documented() -> None:
    from invrl.types.reasons import FailureReason

    page = (DOCS / "troubleshooting.md").read_text()
    for reason in FailureReason:
        assert f"`{reason}`" in page, reason


def test_readme_stays_within_its_word_limit() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_readme_counts_the_presets_and_leads_to_the_front_page() -> None:
    from invrl.algorithms.presets import PRESETS

    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"(\d+) presets", readme) == [str(len(PRESETS))]
    assert "(docs/index.md)" in readme


def test_counts_of_presets_on_other_pages_are_right() -> None:
    from invrl.algorithms.presets import PRESETS

    for page in CURRENT_PAGES:
        for count in re.findall(r"(\d+) presets", prose_of(page)):
            assert int(count) == len(PRESETS), page_name(page)


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
