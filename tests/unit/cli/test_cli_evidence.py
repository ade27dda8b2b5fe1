"""What shows that weights are not read again: of one node, whatever others do."""

from pathlib import Path

from tie.cli.evidence import WeightWatch, own_view


def test_reads_through_another_directory_do_not_count(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    (bundle / "part").mkdir(parents=True)
    (bundle / "weights").write_bytes(b"w" * 100)
    (bundle / "part" / "more").write_bytes(b"m")
    with own_view(bundle) as view:
        assert (view / "part" / "more").read_bytes() == b"m"
        assert (view / "weights").samefile(bundle / "weights")
        watch = WeightWatch(view, ["weights"])
        (bundle / "weights").read_bytes()
        assert watch.count() == (0, 0)
        watch = WeightWatch(view, ["weights"])
        (view / "weights").read_bytes()
        opens, reads = watch.count()
        assert (opens, reads > 0) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (bundle / "weights").read_bytes() == b"w" * 100


def test_a_bundle_that_cannot_be_linked_is_used_as_it_is(tmp_path: Path) -> None:
    with own_view(tmp_path / "none" / "bundle") as view:
        assert view == tmp_path / "none" / "bundle"
