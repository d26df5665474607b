"""The mirror over the real S3 protocol: s3fs on one side, moto's server on loopback on the other."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.worker.test_mirror import complete, content, save

from everstep.adapters.checkpoints.object_store import ObjectStore
from everstep.domain.errors import WorldError
from everstep.worker.mirror.store_copies import Mirror


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    monkeypatch = pytest.MonkeyPatch()
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield "s3://bucket"
    server.stop()
    monkeypatch.undo()


def test_steps_are_uploaded_pruned_fetched_and_refused_over_s3(bucket: str, tmp_path: Path) -> None:
    url, moved = f"{bucket}/some/run", []
    mirror = Mirror(ObjectStore(url), lambda: moved.append(1))
    assert complete(mirror) == []
    for step in (10, 20, 30):
        save(tmp_path, step, size=6 << 20 if step == 30 else 5000)
        mirror.upload(tmp_path, step)
    assert moved
    assert mirror.prune(30, 2) == [10]
    assert mirror.fetch(tmp_path / "there", newer_than=0) == (30, [])
    assert content(tmp_path / "there" / "step-00000030") == content(tmp_path / "step-00000030")
    shutil.rmtree(tmp_path / "there")
    store = ObjectStore(url)
    name = next(name for name in store.sizes("step-00000030") if not name.endswith("manifest.json"))
    whole = store.read(name)
    store.write(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    step, [(refused, reason)] = mirror.fetch(tmp_path / "there", newer_than=0)
    assert (step, refused) == (20, 30)
    assert "checksum" in reason


def test_a_bucket_that_does_not_exist_is_told(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="there is no bucket none"):
        complete(Mirror(ObjectStore("s3://none/run")))
    save(tmp_path, 10)
    with pytest.raises(WorldError, match="none"):
        Mirror(ObjectStore("s3://none/run")).upload(tmp_path, 10)
