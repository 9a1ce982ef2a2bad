"""A server that answers with bytes, for what no well-behaved one sends: real sockets on this machine."""

import contextlib
import json
import re
import socket
import threading


@contextlib.contextmanager
def raw_server(answer, host="127.0.0.1", keep=1):
    """Yields a server: ``answer(connection, body, number)`` writes what the request with this parsed ``body`` gets, or
    gives it as bytes; the connection closes behind the answer to its request number ``keep``. ``seen``: the bodies.
    ``heads``: the requests' heads. ``url``: the endpoint. ``connections``: how many there were.
    """

    class Server:
        seen, heads = [], []

    def serve(connection):
        with connection, contextlib.suppress(OSError, ConnectionError):
            for _ in range(keep):
                data = b""
                while b"\r\n\r\n" not in data:
                    if not (more := connection.recv(1 << 16)):
                        return
                    data += more
                head, _, rest = data.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                while length and len(rest) < int(length[1]):
                    rest += connection.recv(1 << 16)
                with lock:
                    server.heads.append(head.decode())
                    server.seen.append(json.loads(rest) if rest.strip() else None)
                    number = len(server.seen)
                made = server.answer(connection, server.seen[number - 1], number)
                if made:
                    connection.sendall(made)

    def loop():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            server.connections += 1
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    lock, server = threading.Lock(), Server()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=64) as listening:
        port = listening.getsockname()[1]
        server.answer, server.port = answer, port
        server.seen, server.heads, server.connections = [], [], 0
        server.url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        threading.Thread(target=loop, daemon=True).start()
        try:
            yield server
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # ends accept()


def whole(value, status="200 OK", *headers) -> bytes:
    """A complete answer: a value as JSON, or bytes as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
