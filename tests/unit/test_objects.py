"""Objects of a store, over a real server, and what is said about addresses."""

from __future__ import annotations

import pytest

from nimble_jobs.addresses import problem_of
from nimble_jobs.errors import DataError, NotFound, ObjectTrouble
from nimble_jobs.objects import Objects, Unmet
from tests import s3


def test_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written, read, listed and removed; conditions hold."""
    place = Objects(f"s3://{s3.bucket(monkeypatch)}/a/b")
    assert place.list() == {}
    place.write("x/1", b"one")
    place.create("y", b"two")
    with pytest.raises(Unmet):
        place.create("y", b"three")
    Objects(place.address + "c").write("z", b"beside")
    assert {name: stat.size for name, stat in place.list().items()} == {"x/1": 3, "y": 3}
    assert list(place.list("x")) == ["x/1"]
    version = place.stat("y").version
    place.replace("y", b"four", version)
    with pytest.raises(Unmet):
        place.replace("y", b"five", version)
    assert place.read("y") == b"four"
    place.remove(["y", "gone", "x/1"])
    assert place.list() == {}
    for ask in (place.read, place.stat):
        with pytest.raises(NotFound, match=r"s3://bucket-.*/a/b/y: no such object"):
            ask("y")
    assert place.troubles == 0


def test_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing bucket is named, whatever is asked."""
    s3.bucket(monkeypatch)
    place = Objects("s3://nobody-has-this/a")
    for ask in (lambda: place.read("x"), lambda: place.write("x", b""), place.list):
        with pytest.raises(DataError, match=r"s3://nobody-has-this: no such bucket; expected one that exists"):
            ask()


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is away is trouble that passes; it is asked once, and counted."""
    s3.bucket(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    place = Objects("s3://bucket/a")
    with pytest.raises(ObjectTrouble, match=r"^s3://bucket/a/x: EndpointConnectionError; the object store did not"):
        place.read("x")
    assert place.troubles == 1


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is said."""
    s3.bucket(monkeypatch)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(DataError, match=r"^s3://bucket/a/x: no credentials; expected them in the environment"):
        Objects("s3://bucket/a").write("x", b"")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ftp://host/a", "found the scheme ftp"),
        ("memory://a/b", "found the scheme memory"),
        ("s3://", "found 's3://', which names no bucket"),
        ("s3:///a", "found 's3:///a', which names no bucket"),
        ("s3://bucket", "found 's3://bucket', which names a whole bucket"),
        ("s3://bucket/", "found 's3://bucket/', which names a whole bucket"),
        ("s3://key:secret@bucket/a", "found a user or a password in the address"),
        ("s3://b_$/a", "found the bucket 'b_$'"),
        ("s3://bucket/a//b", "found 's3://bucket/a//b', with a part that is empty or begins with a dot"),
        ("s3://bucket/../b", "found 's3://bucket/../b', with a part that is empty or begins with a dot"),
        ("s3://bucket/a?b", "found 's3://bucket/a?b'"),
    ],
)
def test_addresses(address: str, said: str) -> None:
    """Each mistake is named, and what may be a password is not shown."""
    problem = problem_of(address)
    assert problem is not None
    assert problem[0] == said
    with pytest.raises(DataError) as caught:
        Objects(address)
    assert "secret" not in str(caught.value)


def test_driver_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is not installed is named with what installs it."""
    monkeypatch.setattr("nimble_jobs.addresses.find_spec", lambda _name: None)
    said = r"s3:// needs the package s3fs, which is not installed; expected pip install 'nimble-jobs\[objects\]'"
    with pytest.raises(DataError, match=said):
        Objects("s3://bucket/a")
