"""What --to and --aside do around the folder that they build: what is in their way, what they keep, and modes."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dcr_cli.apply import ApplyResult, apply
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Box
from dcr_cli.durable import Folder
from dcr_cli.errors import ConflictError, LocalError, NotFoundError, UsageError, WrongBaseError
from dcr_cli.receiver import places
from faults import StoppedError, stopped_at, watching
from receivers import claim, fresh_copy, make_delta, names_below, put_into_boxes, tree, write_rich_pair
from strategies import tensor_of, with_changes, write_checkpoint, write_tiny_pair


def test_a_spool_that_a_killed_run_left(tmp_path: Path) -> None:
    shape = (90, 70)
    old = {"w": tensor_of("BF16", shape)}
    new = {"w": with_changes(old["w"], range(0, 6300, 101))}
    base, target = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
    delta = make_delta(base, base, tmp_path / "delta")
    boxes = [(Box((0, at), (1, 1), (90, 35)), Encoding.CONTEXT) for at in (0, 35)]
    put_into_boxes(delta, "w", (old["w"], new["w"]), boxes)

    def stop(kind: str, path: str, other: str) -> None:
        if (tmp_path / ".out.dcr-partial/.dcr/spool").exists():
            raise StoppedError

    with watching(stop), pytest.raises(StoppedError):
        apply(delta, base, to=tmp_path / "out")
    apply(delta, base, to=tmp_path / "out")
    assert tree(tmp_path / "out") == tree(target)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestModes:
    """What is built has the modes and owners of what it is built from, and nobody else reads it before that."""

    @pytest.mark.parametrize("way", ["to", "aside"])
    def test_as_in_the_source(self, tmp_path: Path, way: str) -> None:
        base, target = write_rich_pair(tmp_path)
        delta = make_delta(base, target, tmp_path / "delta")
        modes = {"": 0o2750, "kept": 0o710, "config.json": 0o640, "model-00001-of-00003.safetensors": 0o600}
        for path, mode in modes.items():
            (base / path).chmod(mode)
        if os.geteuid() == 0:
            os.chown(base, 1234, 2345)
            base.chmod(modes[""])
            os.chown(base / "kept", 1234, 2345)
        owner = base.stat().st_uid, base.stat().st_gid
        (tmp_path / "link").symlink_to("base")
        built: set[str] = set()

        def look(kind: str, path: str, other: str) -> None:
            for folder in (*tmp_path.glob(".out.dcr-partial"), *tmp_path.glob("link.dcr-*")):
                if kind == "write" and path.startswith(f"{folder}/") and "/.dcr/" not in path:
                    built.add(os.path.basename(path))
                    assert mode_of(folder) == 0o700
                    assert mode_of(Path(path)) == 0o600 or not (base / os.path.relpath(path, folder)).exists()

        before = os.umask(0o027)
        try:
            with watching(look):
                if way == "to":
                    apply(delta, base, to=tmp_path / "out")
                else:
                    apply(delta, tmp_path / "link", mode="aside", keep_previous=True)
        finally:
            os.umask(before)
        found = tmp_path / ("out" if way == "to" else "link")
        assert {"config.json", "model-00001-of-00002.safetensors"} <= built
        assert tree(found) == tree(target)
        del modes["model-00001-of-00003.safetensors"]
        assert {path: mode_of(found / path) for path in modes} == modes
        assert mode_of(found / "new/deep/template.txt") == 0o640
        assert mode_of(found / "new") & 0o777 == 0o750
        assert (found.stat().st_uid, found.stat().st_gid) == owner
        assert ((found / "kept").stat().st_uid, (found / "kept").stat().st_gid) == owner

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
    def test_a_copy_of_somebody_elses_is_ones_own(self) -> None:
        # Pytest's own folders can be entered by nobody else.
        with TemporaryDirectory(prefix="dcr-test-") as folder:
            root = Path(folder)
            root.chmod(0o755)
            base, target = write_rich_pair(root)
            delta = make_delta(base, target, root / "delta")
            (root / "place").mkdir()
            os.chown(root / "place", 1234, 2345)
            base.chmod(0o555)
            (base / "kept").chmod(0o555)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setgroups([])
                    os.setgid(2345)
                    os.setuid(1234)
                    # Stopped when all has its last mode, and again.
                    with watching(_stop_at("rename", "/.out.dcr-partial")), pytest.raises(StoppedError):
                        apply(delta, base, to=root / "place/out")
                    apply(delta, base, to=root / "place/out")
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            out = root / "place/out"
            assert tree(out) == tree(target)
            assert (mode_of(out), mode_of(out / "kept")) == (0o555, 0o555)
            assert out.stat().st_uid == (out / "config.json").stat().st_uid == 1234


def write_pair(folder: Path) -> tuple[Path, Path, Path]:
    base, target = write_tiny_pair(folder)
    return base, target, make_delta(base, target, folder / "delta")


def linked(folder: Path, link: str, text: str, base: Path, target: Path, delta: Path) -> tuple[Path, Path, Path]:
    """Make a link to a copy of `base`, as if a run had made that: the link, target and delta."""
    above = (folder / link).parent
    above.mkdir(parents=True, exist_ok=True)
    fresh_copy(base, above / text)
    (folder / link).symlink_to(text)
    claim(folder / link)
    return folder / link, target, delta


class TestUnknown:
    """What dcr does not know in the folder that a link is turned from is carried over, or the folder stays."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        """Link, target and delta; the folder behind the link was made for it."""
        return linked(tmp_path, "link", "link-1", *write_pair(tmp_path))

    @pytest.mark.parametrize("moment", ["write", "symlink", "rename", "unlink"])
    def test_written_while_it_is_built(self, case: tuple[Path, Path, Path], moment: str) -> None:
        """Whether before the link is turned, just then, or just before the folder is removed."""
        link, target, delta = case
        old = link.with_name("link-1")

        def write(kind: str, path: str, other: str) -> None:
            is_now = kind == moment and {
                "write": path.endswith(".safetensors"),
                "symlink": True,
                "rename": other == str(link),
                "unlink": path.startswith(f"{old}/") and "/.dcr/" not in path,
            }.get(kind, False)
            if is_now and not (old / "more").exists():
                (old / "more").mkdir(mode=0o750)
                (old / "more/notes.txt").write_text("mine")
                (old / "more/link").symlink_to("nowhere")

        with watching(write):
            result = apply(delta, link, mode="aside")
        if moment == "unlink":
            assert result.not_carried == (f"{old}/more",)
            assert result.previous == str(old)
            assert (old / "more/notes.txt").read_text() == "mine"
            assert tree(link) == tree(target)
        else:
            assert tree(link) == {**tree(target), "more/notes.txt": b"mine"}
            assert os.readlink(link / "more/link") == "nowhere"
            assert mode_of(link / "more") == 0o750
            assert (result.previous, result.not_carried) == (None, ())
            assert not old.exists()

    @pytest.mark.parametrize("can_link", [True, False])
    def test_written_after_it_was_stopped(
        self, case: tuple[Path, Path, Path], can_link: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link, target, delta = case
        with watching(_stop_at("symlink", ".link.dcr-link")), pytest.raises(StoppedError):
            apply(delta, link, mode="aside")
        (link / "notes.txt").write_text("mine")
        (link / "notes.txt").chmod(0o640)
        if not can_link:
            monkeypatch.setattr(Folder, "link_file", lambda *arguments: False)
        result = apply(delta, link, mode="aside")
        assert result.bytes_written == 0
        assert tree(link) == {**tree(target), "notes.txt": b"mine"}
        assert mode_of(link / "notes.txt") == 0o640
        assert not link.with_name("link-1").exists()

    def test_written_before_what_was_kept_is_used_again(self, case: tuple[Path, Path, Path]) -> None:
        link, target, delta = case
        old = link.with_name("link-1")
        apply(delta, link, mode="aside", keep_previous=True)
        new = link.resolve()
        for text in ("notes.txt", "other.txt"):
            (old / text).write_text("mine")
        (new / "other.txt").write_text("not the same")
        link.unlink()
        link.symlink_to("link-1")
        result = apply(delta, link, mode="aside")
        assert link.resolve() == new
        assert tree(link) == {**tree(target), "notes.txt": b"mine", "other.txt": b"not the same"}
        assert (result.previous, result.not_carried) == (str(old), (f"{old}/other.txt",))
        assert (old / "other.txt").read_text() == "mine"

    def test_written_after_the_link_was_turned(self, case: tuple[Path, Path, Path], tmp_path: Path) -> None:
        """A stopped run has left the folder before to the next one, whatever that has to do."""
        link, target, delta = case
        old = link.with_name("link-1")
        with watching(_stop_at("unlink", "config.json")), pytest.raises(StoppedError):
            apply(delta, link, mode="aside")
        assert old.exists()
        (old / "notes.txt").write_text("mine")
        result = apply(delta, link, mode="aside")
        assert result.already
        assert tree(link) == {**tree(target), "notes.txt": b"mine"}
        assert not old.exists()

    @pytest.mark.parametrize("moment", ["mkdir", "symlink"])
    def test_in_a_folder_that_becomes_a_file(self, tmp_path: Path, moment: str) -> None:
        """Whether before anything is built or just before the link is turned."""
        base, target = write_tiny_pair(tmp_path)
        (base / "d").mkdir()
        (base / "d/x.json").write_text("x")
        (target / "d").write_text("a file now")
        delta = make_delta(base, target, tmp_path / "delta")
        link, _, _ = linked(tmp_path, "link", "link-1", base, target, delta)
        mine = tmp_path / "link-1/d/sub/mine.txt"

        def write(kind: str, path: str, other: str) -> None:
            if kind == moment and not mine.exists():
                mine.parent.mkdir()
                mine.write_text("mine")

        with watching(write):
            result = apply(delta, link, mode="aside")
        assert tree(link) == tree(target)
        assert (result.previous, result.not_carried) == (str(tmp_path / "link-1"), (str(mine),))
        assert mine.read_text() == "mine"

    @pytest.mark.parametrize("moment", ["mkdir", "symlink"])
    def test_an_empty_folder_in_a_folder_that_becomes_a_file(self, tmp_path: Path, moment: str) -> None:
        """Nothing is lost with it."""
        base, target = write_tiny_pair(tmp_path)
        (base / "d").mkdir()
        (base / "d/x.json").write_text("x")
        (target / "d").write_text("a file now")
        delta = make_delta(base, target, tmp_path / "delta")
        link, _, _ = linked(tmp_path, "link", "link-1", base, target, delta)

        def make(kind: str, path: str, other: str) -> None:
            if kind == moment:
                (tmp_path / "link-1/d/sub/deep").mkdir(parents=True, exist_ok=True)

        with watching(make):
            result = apply(delta, link, mode="aside")
        assert tree(link) == tree(target)
        assert (result.previous, result.not_carried) == (None, ())

    @pytest.mark.parametrize("what", ["shard", "fifo", "changed"])
    def test_what_cannot_be_carried_over(self, case: tuple[Path, Path, Path], what: str) -> None:
        link, target, delta = case
        old = link.with_name("link-1")

        def write(kind: str, path: str, other: str) -> None:
            if kind == "symlink":
                if what == "shard":
                    (old / "lora.safetensors").write_text("mine")
                elif what == "fifo":
                    os.mkfifo(old / "pipe")
                else:
                    # The new folder has the file too, under the same inode, until it is another file here.
                    (old / "config.json").unlink()
                    (old / "config.json").write_text("mine")

        with watching(write):
            result = apply(delta, link, mode="aside")
        name = {"shard": "lora.safetensors", "fifo": "pipe", "changed": "config.json"}[what]
        assert tree(link) == tree(target)
        assert (result.previous, result.not_carried) == (str(old), (f"{old}/{name}",))
        assert os.path.lexists(old / name)
        assert apply(delta, link, mode="aside").already
        assert os.path.lexists(old / name)


def test_a_folder_that_was_finished_before_it_was_locked(tmp_path: Path) -> None:
    """Two runs build OUT: the second has opened what the first then finishes; it leaves that alone."""
    base, target, delta = write_pair(tmp_path)
    back = make_delta(target, base, tmp_path / "back")
    out, is_done = tmp_path / "out", False

    def finish_first(kind: str, path: str, other: str) -> None:
        nonlocal is_done
        if kind == "create" and path.endswith(".out.dcr-partial/.dcr/lock") and not is_done:
            is_done = True
            apply(delta, base, to=out)

    with watching(finish_first), pytest.raises(ConflictError, match="by another dcr"):
        apply(back, target, to=out)
    assert is_done
    assert tree(out) == tree(target)
    assert mode_of(out) == mode_of(base)


def test_a_built_folder_is_found_again_with_what_is_skipped(tmp_path: Path) -> None:
    base, _, delta = write_pair(tmp_path)
    for step in range(0, 200, 9):
        work = tmp_path / f"work-{step}"
        work.mkdir()
        receiver = fresh_copy(base, work / "receiver")
        (receiver / "extra.safetensors").write_bytes(b"mine")
        link = work / "link"
        link.symlink_to("receiver")
        claim(link)
        run = partial(apply, delta, link, mode="aside", skip=["extra.safetensors"])
        ended = stopped_at(step, run)
        run()
        assert sorted(path.name for path in work.iterdir()) == sorted(["link", os.readlink(link)])
        if ended:
            return
    raise AssertionError("never ended")


def test_a_link_that_is_not_there(tmp_path: Path) -> None:
    delta = write_pair(tmp_path)[2]
    with pytest.raises(NotFoundError):
        apply(delta, tmp_path / "nothing", mode="aside")


class TestOthers:
    """Folders that other links lead to, or were made for, are neither used nor removed."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path, Path]:
        """Base, target and delta."""
        return write_pair(tmp_path)

    def test_a_folder_that_nobody_claims_stays(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = pair
        fresh_copy(base, tmp_path / "v1")
        (tmp_path / "link").symlink_to("v1")
        assert apply(delta, tmp_path / "link", mode="aside").previous == str(tmp_path / "v1")
        assert tree(tmp_path / "v1") == tree(base)
        # What a run made goes, when the link is turned from it.
        first = (tmp_path / "link").resolve()
        back = make_delta(target, base, tmp_path / "back")
        assert apply(back, tmp_path / "link", mode="aside").previous is None
        assert not first.exists()
        assert tree(tmp_path / "v1") == tree(tmp_path / "link") == tree(base)

    @pytest.mark.parametrize("text", ["v1", "v1/tokenizer", "{folder}/v1"])
    def test_a_folder_with_another_link_stays(self, pair: tuple[Path, Path, Path], tmp_path: Path, text: str) -> None:
        link, target, delta = linked(tmp_path, "a", "v1", *pair)
        (tmp_path / "b").symlink_to(text.format(folder=tmp_path))
        (tmp_path / "v1/tokenizer").mkdir(exist_ok=True)
        for dry_run in (True, False):
            assert apply(delta, link, mode="aside", dry_run=dry_run).previous == str(tmp_path / "v1")
        assert tree(link) == tree(target)
        assert tree(tmp_path / "v1") == tree(pair[0])

    def test_links_of_one_name_into_one_folder(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = pair
        back = make_delta(target, base, tmp_path / "back")
        links = [tmp_path / name / "cur" for name in ("h1", "h2")]
        for number, link in enumerate(links):
            fresh_copy(base, tmp_path / f"store/m{number}")
            link.parent.mkdir()
            link.symlink_to(f"../store/m{number}")
            apply(delta, link, mode="aside")
        assert links[0].resolve() != links[1].resolve()
        apply(back, links[1], mode="aside")
        assert tree(links[0]) == tree(target)
        assert tree(links[1]) == tree(base)

    def test_a_folder_that_another_run_is_building(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        """It is let be, also if it is for the same link, which somebody has turned by hand since."""
        base, target, delta = pair
        back = make_delta(target, base, tmp_path / "back")
        fresh_copy(base, tmp_path / "v1")
        fresh_copy(target, tmp_path / "v2")
        link = tmp_path / "link"
        link.symlink_to("v1")
        built: list[str] = []

        def turn(kind: str, path: str, other: str) -> None:
            if kind == "create" and path.endswith(".safetensors") and not built:
                built.append(os.path.dirname(path))
                link.unlink()
                link.symlink_to("v2")
                apply(back, link, mode="aside")
                assert os.listdir(built[0])

        with watching(turn), pytest.raises(ConflictError, match="turned by somebody else"):
            apply(delta, link, mode="aside")
        assert tree(link) == tree(base)
        assert not list(tmp_path.glob(".link*"))

    @pytest.mark.parametrize("what", ["elsewhere", "another folder"])
    def test_a_note_that_was_copied_removes_nothing(
        self, pair: tuple[Path, Path, Path], tmp_path: Path, what: str
    ) -> None:
        """The note of what is to be removed goes along when its folder is copied, or stays when names change."""
        link, _, delta = linked(tmp_path, "x/link", "v1", *pair)
        with watching(_stop_at("unlink", "config.json")), pytest.raises(StoppedError):
            apply(delta, link, mode="aside")
        new = link.resolve()
        assert (new / ".dcr/previous").exists()
        if what == "elsewhere":
            shutil.copytree(new, tmp_path / "y/v2", symlinks=True)
            link = tmp_path / "y/link"
            link.symlink_to("v2")
        else:
            (tmp_path / "x/v1").rename(tmp_path / "x/v0")
        mine = fresh_copy(pair[0], link.with_name("v1"))
        assert apply(delta, link, mode="aside").already
        assert tree(mine) == tree(pair[0])
        assert not (link / ".dcr/previous").exists()

    def test_a_folder_that_got_another_link_after_a_stop(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        link, _, delta = linked(tmp_path, "link", "v1", *pair)
        with watching(_stop_at("unlink", "config.json")), pytest.raises(StoppedError):
            apply(delta, link, mode="aside")
        before = names_below(tmp_path / "v1")
        (tmp_path / "other").symlink_to("v1")
        result = apply(delta, link, mode="aside")
        assert (result.already, result.previous) == (True, str(tmp_path / "v1"))
        assert names_below(tmp_path / "v1") == before


class TestDry:
    """A dry run answers about the command that it was asked for."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> tuple[Path, Path]:
        """A base, behind a link too, and a delta."""
        base, target = write_rich_pair(tmp_path)
        (tmp_path / "link").symlink_to("base")
        claim(tmp_path / "link")
        return base, make_delta(base, target, tmp_path / "delta")

    @pytest.mark.parametrize("way", ["to", "aside", "aside and keep"])
    def test_it_says_what_the_run_says(self, case: tuple[Path, Path], tmp_path: Path, way: str) -> None:
        base, delta = case
        before = names_below(tmp_path)

        def run(*, dry_run: bool) -> ApplyResult:
            if way == "to":
                return apply(delta, base, to=tmp_path / "out", dry_run=dry_run)
            keep = way != "aside"
            return apply(delta, tmp_path / "link", mode="aside", keep_previous=keep, dry_run=dry_run)

        def refuse(kind: str, path: str, other: str) -> None:
            raise AssertionError(f"{kind} {path}")

        with watching(refuse):
            said = run(dry_run=True)
        assert names_below(tmp_path) == before
        result = run(dry_run=False)
        assert said == replace(result, dry_run=True, bytes_written=0)
        assert said.checkpoint == str(tmp_path / ("out" if way == "to" else "link"))
        assert said.mode == ("to" if way == "to" else "aside")
        assert said.room_bytes

    def test_it_refuses_what_the_run_refuses(self, case: tuple[Path, Path], tmp_path: Path) -> None:
        base, delta = case
        (tmp_path / "full").mkdir()
        (tmp_path / "full/x").write_text("x")
        for dry_run in (True, False):
            with pytest.raises(ConflictError, match="no empty folder"):
                apply(delta, base, to=tmp_path / "full", dry_run=dry_run)
            with pytest.raises(LocalError, match=r"there is no folder .*none") as error:
                apply(delta, base, to=tmp_path / "none/out", dry_run=dry_run)
            assert error.value.hint == f"mkdir -p {tmp_path / 'none'}"
            with pytest.raises(UsageError, match="is the checkpoint itself") as usage:
                apply(delta, base, to=base, dry_run=dry_run)
            assert "leave out --to" in str(usage.value.hint)
            with pytest.raises(UsageError, match="not a link"):
                apply(delta, base, mode="aside", dry_run=dry_run)
            with pytest.raises(WrongBaseError, match="nothing to build"):
                apply(delta, tmp_path / "target", to=tmp_path / "out", dry_run=dry_run)
        assert apply(delta, tmp_path / "target", dry_run=True).already

    def test_a_wrong_base_is_called_by_its_link(self, case: tuple[Path, Path], tmp_path: Path) -> None:
        _, delta = case
        shard = next((tmp_path / "link").resolve().glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        for dry_run in (True, False):
            with pytest.raises(WrongBaseError) as error:
                apply(delta, tmp_path / "link", mode="aside", dry_run=dry_run)
            assert error.value.what == str(tmp_path / "link")
            assert re.search("expected content blake3:[0-9a-f]{16}, found blake3:[0-9a-f]{16}(;|$)", error.value.facts)

    @pytest.mark.parametrize("length", [244, 256])
    def test_a_name_that_is_too_long_for_what_is_built(
        self, case: tuple[Path, Path], tmp_path: Path, length: int
    ) -> None:
        """Nothing is written before that is said; a name that fits does."""
        base, delta = case
        before = names_below(tmp_path)
        for dry_run in (True, False):
            with pytest.raises(UsageError, match=r"needs a name of \d+ bytes, 255 are allowed"):
                apply(delta, base, to=tmp_path / ("é" * (length // 2)), dry_run=dry_run)
        assert names_below(tmp_path) == before
        apply(delta, base, to=tmp_path / ("x" * 242))
        link = tmp_path / ("l" * 228)
        link.symlink_to("base")
        before = names_below(tmp_path)
        for dry_run in (True, False):
            with pytest.raises(UsageError, match=r"building beside .* needs a name of \d+ bytes, 255 are allowed"):
                apply(delta, link, mode="aside", dry_run=dry_run)
        assert set(names_below(tmp_path)) - {"base/.dcr/lock"} == set(before)
        link = tmp_path / ("l" * 223)
        link.symlink_to("base")
        apply(delta, link, mode="aside")

    def test_every_name_is_taken(self, case: tuple[Path, Path], tmp_path: Path) -> None:
        _, delta = case
        apply(delta, tmp_path / "link", mode="aside", keep_previous=True)
        name = os.readlink(tmp_path / "link")
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("base")
        for number in range(2, 10):
            (tmp_path / f"{name}-{number}").write_text("mine")
        assert not apply(delta, tmp_path / "link", mode="aside", dry_run=True).already
        (tmp_path / name / "config.json").unlink()
        for dry_run in (True, False):
            with pytest.raises(ConflictError, match="all names like it"):
                apply(delta, tmp_path / "link", mode="aside", dry_run=dry_run)

    def test_only_where_it_is_built_has_to_have_room(
        self, case: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, delta = case
        monkeypatch.setattr(places, "free_bytes", lambda folder: 0 if folder.path == base else 1 << 40)
        inode = base.stat().st_ino
        monkeypatch.setattr("os.access", lambda path, *rest, dir_fd, **more: os.fstat(dir_fd).st_ino != inode)
        assert apply(delta, base, to=tmp_path / "out", dry_run=True).room_bytes
        with pytest.raises(LocalError, match="may not change names"):
            apply(delta, base, dry_run=True)
        inode = tmp_path.stat().st_ino
        with pytest.raises(LocalError, match="may not change names"):
            apply(delta, base, to=tmp_path / "out", dry_run=True)


def _stop_at(step: str, part: str) -> Callable[[str, str, str], None]:
    """Stop at the first step of a kind on a path that ends with `part`, and at every step after it."""
    is_stopped = False

    def stop(kind: str, path: str, other: str) -> None:
        nonlocal is_stopped
        is_stopped = is_stopped or (kind == step and path.endswith(part))
        if is_stopped:
            raise StoppedError

    return stop
