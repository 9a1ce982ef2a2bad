"""Datasets on S3 (a local server): written in parts, listed, verified and read back with the same digest as on disk."""

import pytest

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
server = pytest.importorskip("moto.server", reason="moto's server is not installed")


@pytest.fixture(scope="module")
def bucket():
    import fsspec

    service = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    service.start()
    host, port = service.get_host_and_port()
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        patch.setenv(name, value)
    fsspec.config.conf["s3"] = {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test"}
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket"
    fsspec.config.conf.pop("s3")
    patch.undo()
    service.stop()


def rows():
    from storage.schema import complete_row

    return [
        complete_row("text/1", {"text": f"line {i}"}, dataset="lines", source="made", origin="human")
        for i in range(100)
    ]


def test_a_dataset_on_s3_equals_the_one_on_disk(bucket, tmp_path):
    from storage.datasets import open_dataset, write_dataset

    local = write_dataset(str(tmp_path / "lines"), "lines", "text/1", rows(), rows_per_part=30)
    remote = write_dataset(f"{bucket}/lines", "lines", "text/1", rows(), rows_per_part=30)
    assert remote["digest"] == local["digest"] and len(remote["parts"]) == 4
    opened = open_dataset(f"{bucket}/lines")
    opened.verify()
    assert [r["text"] for r in opened.iter_rows()] == [f"line {i}" for i in range(100)]


def test_the_dataset_store_can_live_on_s3(bucket, tmp_path, monkeypatch):
    from storage import store
    from storage.datasets import open_dataset, write_dataset

    monkeypatch.setenv("POSTTRAIN_DATASETS", f"{bucket}/store")
    manifest = write_dataset(str(tmp_path / "lines"), "lines", "text/1", rows())
    ref = store.publish_dataset(tmp_path / "lines", "lines")
    resolved = store.resolve("dataset:lines@latest")
    assert resolved.digest == manifest["digest"] and str(resolved.path).startswith("s3://")
    assert open_dataset(str(resolved.path)).num_rows == 100, ref


def test_a_removal_on_s3_is_finished_after_a_kill(bucket, tmp_path, monkeypatch):
    """The manifest goes first: what is left of the parts is no dataset, and the doctor deletes it."""
    import fsspec

    from flows import report
    from storage import removal, store
    from storage.datasets import write_dataset

    monkeypatch.setenv("POSTTRAIN_DATASETS", f"{bucket}/removed")

    def published():
        write_dataset(str(tmp_path / "lines"), "lines", "text/1", rows())
        return store.publish_dataset(tmp_path / "lines", "lines")

    found = published()
    result = removal.Shelf().named("dataset:lines@latest")[0]
    assert result.there and removal.sizes([result])[1] > 0
    with monkeypatch.context() as patched:
        patched.setattr(fsspec.core.url_to_fs(bucket)[0], "rm", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            removal.remove(result)
    assert store.dataset_versions("lines") == [found.digest] and store.removed("dataset", "lines", found.digest)
    with pytest.raises(store.StoreError):
        store.resolve("dataset:lines@latest")
    assert report.datasets() == []
    assert removal.finish() == 1 and store.dataset_versions("lines") == [] and removal.finish() == 0
    assert published().digest == found.digest and store.resolve("dataset:lines@latest").path == found.path
    removal.remove(result)
    with pytest.raises(store.StoreError, match="removed with `posttrain rm`"):
        store.resolve("dataset:lines@latest")
