"""A desktop of one window without a desktop: RFB 3.8 over WebSocket, and the page with noVNC that shows it.

The screen is black. A click paints a red square at its place, the space bar paints everything green. Needs nothing but Python.
Usage: desktop.py PORT NOVNC_FOLDER
"""

import base64
import hashlib
import http.server
import struct
import sys
from pathlib import Path

WIDTH, HEIGHT, SQUARE = 320, 240, 20
TYPES = {".html": "text/html", ".js": "text/javascript"}
PAGE, NOVNC = Path(__file__).with_name("desktop.html"), Path(sys.argv[2]).resolve()
# Blue, green, red, unused: the pixel format that the server announces and noVNC asks for.
BLACK, RED, GREEN = b"\0\0\0\0", b"\0\0\xff\0", b"\0\xff\0\0"
PIXEL_FORMAT = struct.pack("!BBBBHHHBBB3x", 32, 24, 0, 1, 255, 255, 255, 16, 8, 0)


class Frames:
    """The bytes within binary frames of a client, and frames to it."""

    def __init__(self, reader, writer):
        self.reader, self.writer, self.pending = reader, writer, b""

    def exactly(self, count):
        got = self.reader.read(count)
        if len(got) < count:
            raise EOFError
        return got

    def read(self, count):
        while len(self.pending) < count:
            first, second = self.exactly(2)
            length = second & 127
            if length > 125:
                length = int.from_bytes(self.exactly(2 if length == 126 else 8), "big")
            mask = self.exactly(4)
            data = bytes(byte ^ mask[place % 4] for place, byte in enumerate(self.exactly(length)))
            if first & 15 == 8:
                raise EOFError
            if first & 15 in (0, 2):
                self.pending += data
        taken, self.pending = self.pending[:count], self.pending[count:]
        return taken

    def write(self, data):
        size = len(data)
        length = bytes([size]) if size < 126 else b"\x7e" + struct.pack("!H", size) if size < 65536 else b"\x7f" + struct.pack("!Q", size)
        self.writer.write(b"\x82" + length + data)
        self.writer.flush()


class Screen:
    """One client's screen."""

    def __init__(self, frames):
        self.frames = frames
        self.pixels = bytearray(BLACK * (WIDTH * HEIGHT))
        self.format = PIXEL_FORMAT
        self.wanted, self.changed = False, True

    def serve(self):
        read, write = self.frames.read, self.frames.write
        write(b"RFB 003.008\n")
        read(12)
        write(b"\x01\x01")
        read(1)
        write(b"\0\0\0\0")
        read(1)
        name = b"desktop"
        write(struct.pack("!HH", WIDTH, HEIGHT) + PIXEL_FORMAT + struct.pack("!I", len(name)) + name)
        while True:
            self.message(read(1)[0])
            if self.wanted and self.changed:
                self.wanted = self.changed = False
                write(struct.pack("!BxHHHHHi", 0, 1, 0, 0, WIDTH, HEIGHT, 0) + self.pixels)

    def message(self, kind):
        read = self.frames.read
        if kind == 0:
            self.format = read(19)[3:]
        elif kind == 2:
            read(4 * struct.unpack("!xH", read(3))[0])
        elif kind == 3:
            # One that is not incremental wants everything, changed or not.
            self.changed |= not read(9)[0]
            self.wanted = True
        elif kind == 4:
            down, key = struct.unpack("!B2xI", read(7))
            if down and key == ord(" "):
                self.paint(GREEN, range(WIDTH), range(HEIGHT))
        elif kind == 5:
            buttons, x, y = struct.unpack("!BHH", read(5))
            if buttons & 1:
                self.paint(RED, range(x, min(x + SQUARE, WIDTH)), range(y, min(y + SQUARE, HEIGHT)))
        elif kind == 6:
            read(struct.unpack("!3xI", read(7))[0])
        else:
            raise EOFError

    def paint(self, color, columns, rows):
        # Clients may ask for another order of the colours.
        red, green, blue = (shift // 8 for shift in self.format[10:13])
        pixel = bytearray(4)
        pixel[red], pixel[green], pixel[blue] = color[2], color[1], color[0]
        for row in rows:
            start = 4 * (row * WIDTH + columns.start)
            self.pixels[start : start + 4 * len(columns)] = pixel * len(columns)
        self.changed = True


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.upgrade()
        path = self.path.partition("?")[0].lstrip("/")
        file = NOVNC / path.removeprefix("novnc/") if path.startswith("novnc/") else PAGE if not path else None
        known = file and file.is_file() and file.resolve().is_relative_to(NOVNC if path else PAGE.parent)
        body = file.read_bytes() if known else b"nothing here"
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", TYPES.get(file.suffix, "text/plain") if known else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def upgrade(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        if "binary" in self.headers.get("Sec-WebSocket-Protocol", ""):
            self.send_header("Sec-WebSocket-Protocol", "binary")
        self.end_headers()
        self.close_connection = True
        try:
            Screen(Frames(self.rfile, self.wfile)).serve()
        except (EOFError, OSError):
            return

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
