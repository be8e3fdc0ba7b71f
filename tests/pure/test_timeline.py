"""Logs of made-up hosts, merged on one clock: the order of messages, the true offset, damage, and what is drawn."""

import io
import itertools
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli import clocks, timeline_jobs
from kvferry.cli.clocks import Bound, _Messages
from kvferry.cli.main import main
from kvferry.cli.timeline import notes
from kvferry.cli.timeline_jobs import Found, Job, Kind, Wanted, find, jobs
from kvferry.cli.timeline_page import SCRIPT, Page
from kvferry.cli.timeline_trace import Trace
from kvferry.cli.transfer_records import Log, decode, open_logs
from kvferry.errors import KVFerryError, Reason

from ..support.transfer_logs import Host, load_lines, scheduler_lines, write_logs

ALL = Wanted("", 30)
ROUNDING = 1e-6
EVIL = "</title></svg><script>alert(1)</script>\"'&\x1b[31m[red]"


def a_run(
    folder: Path, seed: int, num_loads: int, hosts: Sequence[Host], num_targets: int, latency: float = 0.002
) -> list[Log]:
    """Write the logs of loads from the other hosts to ``num_targets``, some seconds apart."""
    drawn, targets, sources = random.Random(seed), hosts[:num_targets], hosts[num_targets:]
    lines, began = [], 0.0
    for number in range(num_loads):
        began += drawn.choice((0.0, 0.001, 3.0, 200.0)) * drawn.random()
        chosen = drawn.sample(sources, drawn.randint(1, len(sources)))
        lines += load_lines(number, began, drawn.choice(targets), chosen, lambda: latency * (0.05 + drawn.random()))
    return write_logs(folder, lines)


def render(logs: Sequence[Log], wanted: Wanted = ALL) -> tuple[Found, list[Job], str, str]:
    """Return what is found, all jobs, the trace and the page."""
    found = find(logs, wanted)
    trace, page = io.StringIO(), io.StringIO()
    drawn, sections, every = Trace(trace), Page(found.shown), []
    for job in jobs(logs, found, wanted):
        every.append(job)
        drawn.add(job)
        sections.add(job)
    drawn.close({})
    sections.write(page, ["a note"])
    return found, every, trace.getvalue(), page.getvalue()


offsets = st.floats(-1e6, 1e6)
drifts = st.floats(-4.9e-5, 4.9e-5)
hosts_with_clocks = st.lists(st.tuples(offsets, drifts, st.floats(-5, 5)), min_size=2, max_size=4).map(
    lambda drawn: [Host(f"host{number}", 2e6 + offset, *rest) for number, (offset, *rest) in enumerate(drawn)]
)


@settings(max_examples=40, deadline=None)
@given(hosts=hosts_with_clocks, seed=st.integers(0, 1 << 32), num_loads=st.integers(1, 12), data=st.data())
def test_messages_arrive_after_they_were_sent_and_the_true_offset_is_in_the_interval(
    hosts: list[Host], seed: int, num_loads: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    num_targets = data.draw(st.integers(1, len(hosts) - 1))
    logs = a_run(tmp_path_factory.mktemp("logs"), seed, num_loads, hosts, num_targets)
    found, every, _, _ = render(logs)
    sent = {arrow.name: arrow.at for job in every for arrow in job.arrows if arrow.is_sent}
    arrived = {arrow.name: arrow.at for job in every for arrow in job.arrows if not arrow.is_sent}
    assert sent.keys() == arrived.keys()
    assert len(sent) == 2 * found.num_pairs >= 2 * num_loads
    assert all(sent[name] <= arrived[name] + ROUNDING for name in sent)
    by_name = {host.name: host for host in hosts}
    reference = by_name[found.alignment.reference]
    lines = [json.loads(line) for log in logs for line in log.path.read_text().splitlines()]
    for line in lines:
        moment = line["events"]["clock"] if "events" in line else line["clock"]
        host, time = by_name[moment["boot"]], moment["monotonic"]
        offset = found.alignment.offset(host.name, time)
        true = reference.at(host.true(time)) - time
        assert offset.lowest - ROUNDING <= true <= offset.highest + ROUNDING
        assert offset.lowest - ROUNDING <= offset.chosen <= offset.highest + ROUNDING
    if len(hosts) == 2:
        assert max(offset.uncertainty for offset in found.worst.values()) <= 0.006, "a load takes some milliseconds"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_damaged_logs_are_survived(seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Damaged bytes, exchanged values and cut ends give a drawing or a refusal, and the drawing holds its spans."""
    folder = tmp_path_factory.mktemp("logs")
    logs = a_run(folder, seed, 3, [Host("d", 5.0), Host("p", 900.0)], 1)
    for log in logs:
        damaged = bytearray(log.path.read_bytes())
        for _ in range(data.draw(st.integers(0, 4))):
            begin = data.draw(st.integers(0, len(damaged)))
            end = data.draw(st.integers(begin, min(len(damaged), begin + 9)))
            damaged[begin:end] = data.draw(st.sampled_from([b"", b"9", b"-", b"e9", b"null", b"\n", b"\xff", b"{}"]))
        log.path.write_bytes(damaged)
    try:
        found, every, trace, page = render(open_logs([log.path for log in logs]))
    except KVFerryError:
        return
    json.loads(trace)
    assert_within(every)
    check_page(page)
    assert sum(vars(each)["records"] for each in found.lines.values()) > 0


def assert_within(every: Sequence[Job]) -> None:
    for job in every:
        for part in job.parts:
            assert job.whole.began - ROUNDING <= part.began <= part.ended + ROUNDING
            assert part.ended <= job.whole.ended + ROUNDING


class Tags(HTMLParser):
    """What a browser would see: tags, and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, _: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data.strip())


def check_page(page: str) -> list[ElementTree.Element]:
    """Assert that every span is inside its drawing, and that no script runs but the page's own; return the spans."""
    seen = Tags()
    seen.feed(page)
    seen.close()
    assert seen.tags.count("script") == 1
    assert seen.scripts == [SCRIPT]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page), "the page needs no network"
    rectangles = []
    for drawing in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(drawing)
        for each in (each for each in root if each.tag.endswith("rect")):
            left, width = (float(each.attrib[name].removesuffix("%")) for name in ("x", "width"))
            assert 0 <= left <= left + width <= 100 + 1e-5
            assert int(each.attrib["y"]) + int(each.attrib["height"]) <= int(root.attrib["height"])
            rectangles.append(each)
    return rectangles


def test_a_page_holds_every_span_and_what_clients_write_is_inert(tmp_path: Path) -> None:
    target, sources = Host("d", 5.0), [Host("p", 900.0), Host("q", 70.0)]
    drawn = random.Random(2)
    lines = load_lines(1, 1.0, target, sources, lambda: 0.001 * drawn.random(), EVIL)
    lines += scheduler_lines(lines, sources[0], target)
    others = load_lines(2, 1.001, target, sources, lambda: 0.002 * drawn.random())
    lines += others + scheduler_lines(others, sources[0], target)
    _, every, trace, page = render(write_logs(tmp_path, lines))
    spans = check_page(page)
    assert (
        len(spans)
        == sum(1 + len(job.parts) for job in every)
        == 2 * (1 + 5 + 2 * (1 + 4) + 2 * (1 + 1) + 1 + 2 + 1 + 1)
    )
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    assert {span.attrib["class"] for span in spans} == {kind.name for kind in Kind}
    assert_within(every)
    events = json.loads(trace)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(spans)
    for _, of_thread in itertools.groupby(sorted(slices, key=thread_of), key=thread_of):
        assert_nested(list(of_thread))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {thread_of(event) for event in slices} == named
    starts, ends = ([event["id"] for event in events if event["ph"] == phase] for phase in "sf")
    assert sorted(starts) == sorted(ends)
    assert len(set(starts)) == 8


def thread_of(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def assert_nested(slices: list[dict[str, Any]]) -> None:
    """Trace viewers drop a slice that begins within another and ends after it."""
    ends: list[float] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"] + 1:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 1
        ends.append(end)


def test_a_schedulers_log_beside_one_of_a_rank_is_drawn(tmp_path: Path) -> None:
    """On the clock of the decode engine: the hold of a prompt, and the first token of the request that loads it."""
    target, source = Host("d", 5.0, log="decode.rank0"), Host("p", 900.0, log="prefill.rank0")
    lines = []
    for number in (1, 2):
        of_load = load_lines(number, number, target, [source], lambda: 0.001)
        lines += of_load + scheduler_lines(of_load, source, target)
    write_logs(tmp_path, lines)
    for name in ("decode", "prefill"):
        (tmp_path / f"{name}.rank0.scheduler").rename(tmp_path / f"{name}.scheduler")
    named = [tmp_path / "decode.rank0", tmp_path / "prefill.rank0"]
    logs = open_logs([*named, tmp_path / "prefill.scheduler"])
    assert sorted(log.label for log in logs) == [
        "decode.rank0",
        "decode.scheduler",
        "prefill.rank0",
        "prefill.scheduler",
    ]
    found, every, trace, page = render(open_logs(named), Wanted("cmpl-2", 9))
    of_kind = {kind: [job for job in every if job.whole.kind is kind] for kind in Kind}
    [hold], [request], [load] = (of_kind[kind] for kind in (Kind.HOLD, Kind.REQUEST, Kind.LOAD))
    assert (hold.log, request.log) == ("prefill.scheduler", "decode.scheduler")
    assert [part.kind for part in hold.parts] == [Kind.FIRST_TOKEN, Kind.KEPT]
    assert dict(hold.whole.details)["ended"] == "released"
    assert_within(every)
    committed_at = load.parts[-1].began
    off = max(offset.uncertainty for offset in found.worst.values()) + ROUNDING
    assert hold.whole.began == pytest.approx(load.whole.began - 0.002, abs=off)
    assert hold.parts[1].began == pytest.approx(committed_at, abs=off)
    [first] = request.parts
    assert (first.began, first.ended) == pytest.approx((committed_at + 0.001, committed_at + 0.004), abs=ROUNDING)
    names = {event["args"]["name"] for event in json.loads(trace)["traceEvents"] if event["name"] == "thread_name"}
    assert {"holds", "requests"} < names
    drawn = {span.attrib["class"] for span in check_page(page)}
    assert drawn == {kind.name for kind in Kind}


def test_a_request_that_ended_before_its_first_token_is_drawn(tmp_path: Path) -> None:
    target, source = Host("d", 5.0), Host("p", 900.0)
    lines = load_lines(1, 1.0, target, [source], lambda: 0.001)
    hold, loaded = scheduler_lines(lines, source, target)
    hold[2].update(first_step_at=None, first_token_at=None, held_at=None, ending="dropped")
    loaded[2].update(first_token_at=None)
    _, every, _, page = render(write_logs(tmp_path, [*lines, hold, loaded]))
    assert [(job.parts, job.whole.kind) for job in every if "scheduler" in job.log] == [
        ((), Kind.REQUEST),
        ((), Kind.HOLD),
    ]
    assert "request cmpl-1: no token" in page
    check_page(page)


def test_logs_that_no_offset_explains_are_refused(tmp_path: Path) -> None:
    target, source = Host("d", 5.0), Host("p", 900.0)
    lines = load_lines(1, 1.0, target, [source], lambda: 0.001) + load_lines(2, 1.5, target, [source], lambda: 0.001)
    # The second load's source is 50 ms behind itself: more than the ways of both loads explain.
    source.offset -= 0.05
    shifted = load_lines(2, 1.5, target, [source], lambda: 0.001)
    with pytest.raises(KVFerryError, match=r"contradict each other by \d+\.\d+ ms at 'write") as refusal:
        find(write_logs(tmp_path, lines[:3] + shifted), ALL)
    assert refusal.value.reason is Reason.INVALID_REQUEST
    assert find(write_logs(tmp_path, lines), ALL).num_pairs == 2


def test_ranks_of_one_host_share_its_clock_exactly(tmp_path: Path) -> None:
    target, source = Host("d", 5.0), Host("p", 5.0)
    lines = load_lines(1, 1.0, target, [source], lambda: 0.001)
    target.name = source.name = "same"
    text = json.dumps([line for _, _, line in lines]).replace('"boot": "d"', '"boot": "p"')
    on_one_host = [(target, float(number), line) for number, line in enumerate(json.loads(text))]
    found = find(write_logs(tmp_path, on_one_host), ALL)
    assert found.alignment.clocks == ["p"]
    assert found.alignment.offset("p", 3.0).uncertainty == 0
    late = [line for _, _, line in on_one_host if "request_id" in line]
    late[0]["events"]["done_at"]["0"] = late[0]["events"]["announced_at"]["0"]
    with pytest.raises(KVFerryError, match="share one clock"):
        find(write_logs(tmp_path, on_one_host), ALL)


def test_a_clock_without_answers_is_aligned_by_the_time_of_day(tmp_path: Path) -> None:
    """A write that failed was announced and never done."""
    target, source = Host("d", 5.0), Host("p", 900.0, wall_error=0.25)
    lines = load_lines(1, 1.0, target, [source], lambda: 0.001)
    for _, _, line in lines:
        if "request_id" in line:
            line["events"] |= {"done_at": {}, "committed_at": None, "phases": None}
    found, every, _, _ = render(write_logs(tmp_path, lines))
    [other] = found.alignment.clocks[1:]
    offset = found.alignment.offset(other, 901.0)
    assert offset.uncertainty == float("inf")
    assert abs(offset.chosen) == pytest.approx(895 - 0.25, abs=0.01)
    assert_within(every)


def test_clocks_that_drift_apart_do_not_contradict_each_other(tmp_path: Path) -> None:
    """In 200 s two clocks drift apart by 20 ms, and a load lasts 7 ms."""
    target, source = Host("d", 5.0, 4.9e-5), Host("p", 900.0, -4.9e-5)
    lines = [
        line for number in range(3) for line in load_lines(number, 200.0 * number, target, [source], lambda: 0.001)
    ]
    found, *_ = render(write_logs(tmp_path, lines))
    assert max(offset.uncertainty for offset in found.worst.values()) < 0.002


def test_hosts_without_a_message_between_them_are_aligned_over_others(tmp_path: Path) -> None:
    d, e, p, q = (Host(name, 100.0 + 50 * at, wall_error=9.0 * at) for at, name in enumerate("depq"))
    lines = [load_lines(at, at, *pair, lambda: 0.001) for at, pair in enumerate([(d, [p]), (e, [p]), (e, [q])])]
    alignment = find(write_logs(tmp_path, [line for of_load in lines for line in of_load]), ALL).alignment
    assert alignment.reference == "e"
    for host in (d, p, q):
        assert alignment.offset(host.name, host.at(1)).chosen == pytest.approx(e.offset - host.offset, abs=0.003)


@pytest.mark.parametrize(
    "name",
    ["announced_at", "reported_at", "posted_at", "landed_at", "step_began_at", "ordered_at", "began_at", "held_at"],
)
def test_a_record_whose_times_contradict_each_other_is_none(name: str) -> None:
    target, source = Host("d", 5.0), Host("p", 9.0)
    of_load = load_lines(1, 1.0, target, [source], lambda: 0.001)
    lines = [json.dumps(line) for _, _, line in of_load + scheduler_lines(of_load, source, target)]
    [*_, text] = [text for text in lines if name in text]
    assert decode(text.encode())
    later = {"announced_at": 10.5, "posted_at": 10.5, "step_began_at": 10.5, "ordered_at": 6.5}.get(name, 10.001)
    changed = re.sub(rf'"{name}": (?:[\d.]+|{{"0": [\d.]+}})', lambda found: moved(found[0], later), text, count=1)
    assert changed != text
    with pytest.raises(ValueError, match="contradict"):
        decode(changed.encode())


def moved(field: str, time: float) -> str:
    return re.sub(r"[\d.]+(}?)$", rf"{time}\1", field)


@pytest.mark.parametrize("seconds", [1e300, -1e300])
def test_phases_that_no_clock_could_measure_are_damage(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [load_lines(at, at, Host("d", 5.0), [Host("p", 9.0)], lambda: 0.001) for at in (1, 2)]
    for _, _, line in lines[1]:
        if "phases" in line:
            line["phases"]["next_step"] = seconds
    logs = [log.path for log in write_logs(tmp_path, lines[0] + lines[1])]
    code, output, _ = told(monkeypatch, capsys, *logs, "--trace", tmp_path / "trace.json")
    assert code == 0
    assert "d: 1 damaged and 0 half-written lines" in output
    json.loads((tmp_path / "trace.json").read_text())


def test_clocks_that_nothing_drawn_uses_are_not_told(tmp_path: Path) -> None:
    target, sources = Host("d", 5.0), [Host("p", 900.0), Host("q", 70.0)]
    lines = [load_lines(at, at, target, [source], lambda: 0.001) for at, source in enumerate(sources)]
    logs = write_logs(tmp_path, lines[0] + lines[1])
    for request, expected in (("", {"p", "q"}), ("cmpl-0", {"p"}), ("cmpl-1", {"q"})):
        found, *_ = render(logs, Wanted(request, 9))
        named = {name for name in "pq" for note in notes(found, logs) if f"The clock of {name} is aligned" in note}
        assert (named, found.alignment.reference) == (expected, "d")


def test_of_messages_that_say_nothing_new_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "MOST_SAMPLES", 64)
    drawn, messages, all_of_them = random.Random(1), _Messages(limit=64), []
    for number in range(2000):
        all_of_them.append(clocks.Message(number / 1000, drawn.random(), str(number)))
        messages.add(all_of_them[-1])
        assert len(messages.kept) <= 64
    kept, every = (Bound((each.sent_at, each.seconds) for each in some) for some in (messages.kept, all_of_them))
    assert [kept.at(tenth / 10) for tenth in range(20)] == pytest.approx([every.at(tenth / 10) for tenth in range(20)])


def test_what_waits_for_the_other_side_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_jobs, "MOST_UNPAIRED", 2)
    target, source = Host("d", 5.0), Host("p", 900.0)
    lines = [line for number in range(5) for line in load_lines(number, 1.0, target, [source], lambda: 0.001)]
    found = find(write_logs(tmp_path, [line for line in lines if "write" not in line[2]]), ALL)
    assert (found.unpaired_loads, found.unpaired_writes, found.num_pairs) == (5, 0, 0)
    [shown] = find(open_logs([tmp_path / "d"]), Wanted("cmpl-3", 9)).shown
    assert shown.load.request_id == "cmpl-3"


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[object, str, str]:
    """Run the command in this process; return exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["kvferry", "timeline", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_the_command_prints_a_table_and_writes_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, sources = Host("d", 5.0), [Host("p", 900.0)]
    lines = load_lines(1, 1.0, target, sources, lambda: 0.001, EVIL)
    logs = [log.path for log in write_logs(tmp_path, lines + load_lines(2, 1.1, target, sources, lambda: 0.002))]
    with logs[0].open("a") as log:
        log.write('{"rank": 0}\n{"rank": 0, "request_id": "cm')
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    code, output, _ = told(monkeypatch, capsys, *logs, "--trace", trace, "--html", page)
    assert code == 0
    assert "\x1b[31m" not in output
    assert "[red]" in output, "not taken for markup"
    assert "1 damaged and 1 half-written lines" in output
    assert re.search(r"off by at most \d\.\d{3} ms", output)
    everything = json.loads(trace.read_text())
    assert [clock["reference"] for clock in everything["otherData"]["clocks"]] == [True, False]
    check_page(page.read_text())
    assert not list(tmp_path.glob("*.part"))
    code, output, _ = told(monkeypatch, capsys, *logs, "--request", "cmpl-2", "--json", "--trace", trace)
    found = json.loads(output)
    assert [load["request_id"] for load in found["loads"]] == ["cmpl-2"]
    assert found["pairs"] == 2
    assert 0 < found["clocks"][1]["uncertain_seconds"] < 0.01
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert 0 < len(slices) == len([e for e in everything["traceEvents"] if e["ph"] == "X"]) / 2


def test_the_command_refuses_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [log, other] = write_logs(tmp_path, load_lines(1, 1.0, Host("d", 5.0), [Host("p", 9.0)], lambda: 0.001))
    before = log.path.read_bytes(), other.path.read_bytes()
    text = tmp_path / "text"
    text.write_text("no record\n")
    for arguments, wanted in {
        (log.path, other.path, "--html", other.path): "is a log or other output",
        (log.path, "--html", tmp_path / "x", "--trace", tmp_path / "x"): "is a log or other output",
        (log.path, other.path, "--trace", tmp_path / "missing" / "x"): "cannot be written",
        (tmp_path / "missing",): "cannot be read: No such file",
        (tmp_path,): "cannot be read: Is a directory",
        (text,): "none of the 1 lines",
        (log.path, other.path, "--request", "cmpl-7"): "Did you mean 'cmpl-1'",
    }.items():
        code, _, error = told(monkeypatch, capsys, *arguments)
        assert code == 2, arguments
        assert wanted in error
    assert before == (log.path.read_bytes(), other.path.read_bytes())


def test_an_output_replaces_no_log_by_any_name_and_only_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_logs(tmp_path, load_lines(1, 1.0, Host("d", 5.0), [Host("x.part", 9.0)], lambda: 0.001))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    before = {path: path.read_bytes() for path in (tmp_path / "d", tmp_path / "x.part")}
    for output, wanted in {
        "d": "is a log or other output",
        str(tmp_path / "d"): "is a log or other output",
        "link": "is a log or other output",
        "x": "is a log or other output",
        ".": "is no file",
        "..": "is no file",
        "pipe": "is no file",
        "circle": "cannot be written",
        "n" * 300: "cannot be written",
    }.items():
        code, _, error = told(monkeypatch, capsys, "d", "x.part", "--trace", output)
        assert code == 2, output
        assert wanted in error
    code, _, error = told(monkeypatch, capsys, "d", "x.part", "--trace", "y", "--html", "y.part")
    assert (code, "is a log or other output" in error) == (2, True)
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_that_is_interrupted_leaves_the_former_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    logs = write_logs(tmp_path, load_lines(1, 1.0, Host("d", 5.0), [Host("p", 9.0)], lambda: 0.001))
    page = tmp_path / "page.html"
    page.write_text("before")
    monkeypatch.setattr(Page, "write", interrupt)
    code, output, _ = told(monkeypatch, capsys, *(log.path for log in logs), "--html", page)
    assert (code, output) == (130, "")
    assert {path.name for path in tmp_path.iterdir()} == {"d", "p", "page.html"}
    assert page.read_text() == "before"
