/* The program inside the sandboxes that proxy measurements talk to. Listens on port 8080, or the one given.
 *
 *   GET  /          "ok\n"
 *   GET  /bytes/N   N bytes with Content-Length
 *   POST /sink      reads the body, answers its length
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
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd)) close(fd);
        else pthread_detach(thread);
    }
}
