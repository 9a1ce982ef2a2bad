"""A server with the part of the Hugging Face Hub's interface that uploads go through: real HTTP on this machine,
repositories in memory.
"""

import base64
import contextlib
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.serving import serving

USER, TOKEN, READS_ONLY = "me", "hf_writes", "hf_reads"


@contextlib.contextmanager
def hub_server():
    """Yields a server: ``url``; ``repos``: {(kind, OWNER/NAME): {"private", "files": {path: bytes}, "commits":
    [message]}}; ``calls``: (method, path); ``blobs``: what came by LFS.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status=200, value=None, **headers):
            body = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status, text, **headers):
            self.answer(status, {"error": text}, X_Error_Message=text, **headers)

        def body(self):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def repo_in(self, path):
            kind, owner, name = path.split("/")[2:5]
            return server.repos.get((kind.removesuffix("s"), f"{owner}/{name}"))

        def handle_any(self):
            path, body = urlsplit(self.path).path, self.body()
            server.calls.append((self.command, path))
            if path.startswith("/storage/"):
                server.blobs[path.rsplit("/", 1)[-1]] = body
                return self.answer(ETag='"1"')
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if token not in (TOKEN, READS_ONLY):
                return self.refuse(401, "Invalid credentials in Authorization header")
            if path == "/api/repos/create":
                given = json.loads(body)
                key = (given.get("type", "model"), f"{given.get('organization') or USER}/{given['name']}")
                if token == READS_ONLY or given.get("organization") not in (None, USER):
                    return self.refuse(403, "You don't have the rights to create a repository under this namespace")
                if key in server.repos:
                    return self.refuse(409, f"You already created this {key[0]} repo")
                server.repos[key] = {
                    "private": given.get("visibility") == "private",
                    "files": {".gitattributes": b"*.safetensors lfs\n"},
                    "commits": [],
                }
                return self.answer(value={"url": f"{server.url}/{key[1]}", "name": key[1]})
            if path.endswith(".git/info/lfs/objects/batch"):
                return self.answer(
                    value={
                        "transfer": "basic",
                        "objects": [
                            {"oid": one["oid"], "size": one["size"], "authenticated": True}
                            | (
                                {}
                                if one["oid"] in server.blobs
                                else {"actions": {"upload": {"href": f"{server.url}/storage/{one['oid']}"}}}
                            )
                            for one in json.loads(body)["objects"]
                        ],
                    }
                )
            if path == "/api/validate-yaml":
                return self.answer(value={"errors": [], "warnings": []})
            repo = self.repo_in(path)
            if repo is None:
                return self.refuse(404, "Repository not found", X_Error_Code="RepoNotFound")
            what = path.split("/")[5:]
            if not what or what[0] == "revision":
                return self.answer(
                    value={
                        "id": "/".join(path.split("/")[3:5]),
                        "private": repo["private"],
                        "sha": "0" * 40,
                        "siblings": [],
                        "tags": [],
                    }
                )
            if what[0] == "tree":
                return self.answer(
                    value=[
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in sorted(repo["files"].items())
                    ]
                )
            if token == READS_ONLY:
                return self.refuse(403, "Your token has no write access to this repo")
            if what[0] == "preupload":
                large = lambda name: name.endswith((".safetensors", ".parquet"))  # noqa: E731
                return self.answer(
                    value={
                        "files": [
                            {
                                "path": f["path"],
                                "uploadMode": "lfs" if large(f["path"]) else "regular",
                                "shouldIgnore": False,
                            }
                            for f in json.loads(body)["files"]
                        ]
                    }
                )
            if what[0] == "commit":
                for line in map(json.loads, body.splitlines()):
                    key, value = line["key"], line["value"]
                    if key == "header":
                        repo["commits"].append(value["summary"])
                    elif key == "file":
                        repo["files"][value["path"]] = base64.b64decode(value["content"])
                    elif key == "lfsFile":
                        data = server.blobs[value["oid"]]
                        assert hashlib.sha256(data).hexdigest() == value["oid"]
                        repo["files"][value["path"]] = data
                    elif key == "deletedFile":
                        del repo["files"][value["path"]]
                return self.answer(
                    value={
                        "success": True,
                        "commitUrl": f"{server.url}/{'/'.join(path.split('/')[3:5])}/commit/{len(repo['commits'])}",
                        "commitOid": "1" * 40,
                    }
                )
            self.refuse(404, f"no such thing: {path} {parse_qs(urlsplit(self.path).query)}")

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.repos, server.calls, server.blobs, server.url = {}, [], {}, f"http://127.0.0.1:{server.server_port}"
    with serving(server):
        yield server
