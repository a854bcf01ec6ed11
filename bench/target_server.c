/* The program inside the sandboxes that proxy measurements talk to. Listens on port 8080, or the one given.
 *
 *   GET  /          "ok\n"
 *   GET  /bytes/N   N bytes with Content-Length
 *   POST /sink      reads the body, answers its length
 *   GET  /events/N  N server-sent events, a millisecond apart, each with the moment (CLOCK_MONOTONIC, ns) at which it was sent
 *   GET  /echo      changes to another protocol, in which every byte comes back
 *   GET  /ws        WebSocket: every message of up to 125 bytes comes back
 *
 * Static, one thread for each connection, keep-alive unless told to close. Build: gcc -O2 -static -pthread -o target_server target_server.c
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD 16384
#define BLOCK (256 << 10)

static int send_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent <= 0) return -1;
        data += sent;
        size -= (size_t)sent;
    }
    return 0;
}

static int answer(int fd, const char *body, size_t size) {
    char head[HEAD];
    int used = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %zu\r\n\r\n", size);
    if (size < sizeof head - (size_t)used) {
        memcpy(head + used, body, size);
        return send_all(fd, head, (size_t)used + size);
    }
    return send_all(fd, head, (size_t)used);
}

/* Reads the body of which `have` bytes are here already. */
static int sink(int fd, uint64_t length, uint64_t have, char *block) {
    while (have < length) {
        uint64_t left = length - have;
        ssize_t got = recv(fd, block, left < BLOCK ? (size_t)left : BLOCK, 0);
        if (got <= 0) return -1;
        have += (uint64_t)got;
    }
    char text[32];
    int used = snprintf(text, sizeof text, "%llu\n", (unsigned long long)length);
    return answer(fd, text, (size_t)used);
}

static int bytes(int fd, uint64_t left, char *block) {
    if (answer(fd, "", (size_t)left)) return -1;
    while (left) {
        size_t now = left < BLOCK ? (size_t)left : BLOCK;
        if (send_all(fd, block, now)) return -1;
        left -= now;
    }
    return 0;
}

static int events(int fd, uint64_t left) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    if (send_all(fd, head, sizeof head - 1)) return -1;
    for (; left; left--) {
        struct timespec now;
        char event[64], chunk[96];
        usleep(1000);
        clock_gettime(CLOCK_MONOTONIC, &now);
        int size = sprintf(event, "data: %lld\n\n", now.tv_sec * 1000000000LL + now.tv_nsec);
        size = sprintf(chunk, "%x\r\n%s\r\n", (unsigned)size, event);
        if (send_all(fd, chunk, (size_t)size)) return -1;
    }
    return send_all(fd, "0\r\n\r\n", 5);
}

static uint32_t rotated(uint32_t value, int bits) { return value << bits | value >> (32 - bits); }

/* Of a text of 60 bytes, which is what a handshake proves: two blocks. */
static void sha1_60(const char *text, unsigned char *digest) {
    unsigned char padded[128] = {0};
    uint32_t h[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0}, w[80];
    memcpy(padded, text, 60);
    padded[60] = 0x80;
    padded[126] = 60 * 8 >> 8, padded[127] = (unsigned char)(60 * 8);
    for (int block = 0; block < 2; block++) {
        for (int i = 0; i < 16; i++) {
            const unsigned char *at = padded + block * 64 + i * 4;
            w[i] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        }
        for (int i = 16; i < 80; i++) w[i] = rotated(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        uint32_t a = h[0], b = h[1], c = h[2], d = h[3], e = h[4];
        for (int i = 0; i < 80; i++) {
            uint32_t f = i < 20 ? (b & c) | (~b & d) : i < 40 || i >= 60 ? b ^ c ^ d : (b & c) | (b & d) | (c & d);
            uint32_t k = i < 20 ? 0x5A827999 : i < 40 ? 0x6ED9EBA1 : i < 60 ? 0x8F1BBCDC : 0xCA62C1D6;
            uint32_t next = rotated(a, 5) + f + e + k + w[i];
            e = d, d = c, c = rotated(b, 30), b = a, a = next;
        }
        h[0] += a, h[1] += b, h[2] += c, h[3] += d, h[4] += e;
    }
    for (int i = 0; i < 20; i++) digest[i] = (unsigned char)(h[i / 4] >> (24 - i % 4 * 8));
}

static int websocket(int fd, const char *head) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *key = strcasestr(head, "\r\nsec-websocket-key: ");
    char proof[61], token[29], answer[256];
    unsigned char digest[21] = {0}, frame[131], mask[4];
    if (!key || strlen(key) < 45) return -1;
    memcpy(proof, key + 21, 24);
    memcpy(proof + 24, "258EAFA5-E914-47DA-95CA-C5AB0DC85B11", 37);
    sha1_60(proof, digest);
    for (int i = 0; i < 7; i++) {
        uint32_t three = (uint32_t)digest[i * 3] << 16 | (uint32_t)digest[i * 3 + 1] << 8 | digest[i * 3 + 2];
        for (int j = 0; j < 4; j++) token[i * 4 + j] = letters[three >> (18 - j * 6) & 63];
    }
    token[27] = '=', token[28] = 0;
    int size = sprintf(answer, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %s\r\n\r\n", token);
    if (send_all(fd, answer, (size_t)size)) return -1;
    for (;;) {
        if (recv(fd, frame, 6, MSG_WAITALL) != 6) return -1;
        size_t length = frame[1] & 127;
        if (length > 125 || (length && recv(fd, frame + 6, length, MSG_WAITALL) != (ssize_t)length)) return -1;
        memcpy(mask, frame + 2, 4);
        for (size_t i = 0; i < length; i++) frame[i + 2] = frame[i + 6] ^ mask[i & 3];
        frame[1] = (unsigned char)length;
        if (send_all(fd, (const char *)frame, length + 2)) return -1;
    }
}

/* The handshake's proof is left out: whoever measures with it does not look at it. */
static int echo(int fd, char *block) {
    static const char head[] = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                               "Sec-WebSocket-Accept: x\r\n\r\n";
    if (send_all(fd, head, sizeof head - 1)) return -1;
    ssize_t got;
    while ((got = recv(fd, block, BLOCK, 0)) > 0) {
        if (send_all(fd, block, (size_t)got)) return -1;
    }
    return -1;
}

static int serve_one(int fd, char *head, size_t *filled, char *block) {
    char *end;
    head[*filled] = 0;
    while (!(end = strstr(head, "\r\n\r\n"))) {
        ssize_t got = *filled < HEAD - 1 ? recv(fd, head + *filled, HEAD - 1 - *filled, 0) : 0;
        if (got <= 0) return -1;
        *filled += (size_t)got;
        head[*filled] = 0;
    }
    size_t used = (size_t)(end - head) + 4;
    uint64_t length = 0, have = *filled - used;
    char *field = strcasestr(head, "\r\ncontent-length:");
    if (field && field < end) length = strtoull(field + 17, NULL, 10);
    if (have > length) have = length;
    char *close_after = strcasestr(head, "\r\nconnection: close");
    int last = close_after && close_after < end, failed;
    if (!strncmp(head, "GET /bytes/", 11)) failed = bytes(fd, strtoull(head + 11, NULL, 10), block);
    else if (!strncmp(head, "POST /sink", 10)) failed = sink(fd, length, have, block);
    else if (!strncmp(head, "GET /events/", 12)) failed = events(fd, strtoull(head + 12, NULL, 10));
    else if (!strncmp(head, "GET /echo", 9)) failed = echo(fd, block);
    else if (!strncmp(head, "GET /ws", 7)) failed = websocket(fd, head);
    else failed = answer(fd, "ok\n", 3);
    *filled -= used + (size_t)have;
    memmove(head, head + used + have, *filled);
    return failed || last;
}

static void *serve(void *argument) {
    int fd = (int)(intptr_t)argument, one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char *head = malloc(HEAD), *block = calloc(1, BLOCK);
    size_t filled = 0;
    while (head && block && !serve_one(fd, head, &filled, block)) {}
    free(head);
    free(block);
    close(fd);
    return NULL;
}

int main(int count, char **arguments) {
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(count > 1 ? atoi(arguments[1]) : 8080))};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) return 1;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        pthread_t thread;
        if (pthread_create(&thread, &small, serve, (void *)(intptr_t)fd)) close(fd);
        else pthread_detach(thread);
    }
}
