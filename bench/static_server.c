/* What the agent's streams are compared with: the plainest server of the same bytes, one thread a connection, read and write.
 *
 *   GET  /NAME      a file of the directory, with its length
 *   POST /command   the file "stream" as an event stream, whatever is asked
 *   POST /…         the body, as it comes, into the file "received"
 *
 * Bodies are sent and received in pieces of 256 KiB. Build: gcc -O2 -static -pthread -o static_server static_server.c
 * Use: static_server PORT DIRECTORY
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 256 << 10, HEAD = 16 << 10 };

static int all(int to, const char *data, size_t length) {
    while (length) {
        ssize_t wrote = write(to, data, length);
        if (wrote <= 0) return 0;
        data += wrote;
        length -= wrote;
    }
    return 1;
}

static int answer(int link, const char *name, const char *type, char *piece) {
    int file = open(name, O_RDONLY);
    struct stat known;
    char head[512];
    if (file < 0 || fstat(file, &known)) return 0;
    int size = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %lld\r\n\r\n", type,
                        (long long)known.st_size);
    int fine = all(link, head, size);
    ssize_t got;
    while (fine && (got = read(file, piece, PIECE)) > 0) fine = all(link, piece, got);
    close(file);
    return fine;
}

static int receive(int link, char *piece, size_t have, long long left, int keep) {
    int file = keep ? open("received", O_WRONLY | O_CREAT | O_TRUNC, 0600) : open("/dev/null", O_WRONLY);
    int fine = file >= 0;
    if (fine && have) fine = all(file, piece, have);
    left -= have;
    while (fine && left > 0) {
        ssize_t got = read(link, piece, left < PIECE ? left : PIECE);
        fine = got > 0 && all(file, piece, got);
        left -= got;
    }
    if (file >= 0) close(file);
    return fine;
}

static void *serve(void *argument) {
    int link = (int)(intptr_t)argument, on = 1;
    char *piece = malloc(PIECE), head[HEAD + 1];
    size_t have = 0;
    setsockopt(link, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (;;) {
        char *end;
        head[have] = 0;
        while (!(end = strstr(head, "\r\n\r\n"))) {
            ssize_t got = have < HEAD ? read(link, head + have, HEAD - have) : 0;
            if (got <= 0) goto done;
            head[have += got] = 0;
        }
        end += 4;
        char method[8] = "", path[256] = "", *length = strcasestr(head, "content-length:");
        sscanf(head, "%7s /%255s", method, path);
        long long body = length && length < end ? atoll(length + 15) : 0;
        size_t early = head + have - end;
        if (early > (size_t)body) early = body;
        memcpy(piece, end, early);
        int command = !strncmp(path, "command", 7);
        if (body && !receive(link, piece, early, body, !command)) break;
        have = head + have - end - early;
        memmove(head, end + early, have);
        if (!strcmp(method, "GET") ? !answer(link, path, "application/octet-stream", piece)
            : command ? !answer(link, "stream", "text/event-stream", piece)
                      : !all(link, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 38))
            break;
    }
done:
    close(link);
    free(piece);
    return 0;
}

int main(int count, char **words) {
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (count != 3 || chdir(words[2])) return 2;
    signal(SIGPIPE, SIG_IGN);
    place.sin_port = htons(atoi(words[1]));
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&place, sizeof place) || listen(listener, 64)) return 1;
    for (;;) {
        int link = accept(listener, 0, 0);
        pthread_t thread;
        if (link >= 0 && !pthread_create(&thread, 0, serve, (void *)(intptr_t)link)) pthread_detach(thread);
    }
}
