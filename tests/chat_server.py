"""A server with the OpenAI chat interface, for judges: real HTTP on this machine, answers made by the test."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.serving import serving


@contextlib.contextmanager
def chat_server(choice=None):
    """Yields a server: ``choice(body)`` makes the one choice of an answer, the whole answer as bytes, or the HTTP
    status of a refusal; ``seen`` are the requests' bodies, ``calls`` their (path, Authorization), ``url`` the endpoint,
    ``most`` the requests that were under way at once, ``usage`` what it says of tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append(body)
            server.calls.append((self.path, self.headers.get("Authorization")))
            with lock:
                server.under_way += 1
                server.most = max(server.most, server.under_way)
            try:
                choice = server.choice(body)
            finally:
                with lock:
                    server.under_way -= 1
            self.send_response(choice if isinstance(choice, int) else 200)
            if isinstance(choice, int):
                self.send_header("Retry-After", "0.2")
            self.end_headers()
            self.wfile.write(
                b"no"
                if isinstance(choice, int)
                else (
                    choice
                    if isinstance(choice, bytes)
                    else json.dumps({"choices": [choice]} | ({"usage": server.usage} if server.usage else {})).encode()
                )
            )

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 64

        def handle_error(self, request, client_address):  # a choice that raises leaves the request without an answer
            pass

    lock = threading.Lock()
    server = Server(("127.0.0.1", 0), Handler)
    server.under_way, server.most, server.usage = 0, 0, None
    server.seen, server.calls, server.choice, server.url = [], [], choice, f"http://127.0.0.1:{server.server_port}/v1"
    with serving(server):
        yield server
