/* A stand-in for the reference's agent image, which cannot be fetched everywhere: just enough of the agent API for the
 * reference server and the SDK to create a sandbox and run a command in it.
 *
 *   GET  /ping                  200, empty
 *   POST /command               runs {"command": "..."} with /bin/sh and streams the events of the agent API
 *   ANY  /proxy/44772/<path>    the same routes, as the reference's endpoints name them
 *
 * It does less than a real agent (no token, no files, no tailing), so what is measured with it flatters the reference.
 * Static, one thread for each connection. Build: gcc -O2 -static -pthread -o stub_agent stub_agent.c
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PORT 44772
#define REQUEST 65536

static int send_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent <= 0) return -1;
        data += sent;
        size -= (size_t)sent;
    }
    return 0;
}

static long long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (long long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* One event as one chunk: a JSON object followed by two newlines. */
static int event(int fd, const char *fields) {
    char frame[8300], chunk[8400];
    int size = snprintf(frame, sizeof frame, "{%s,\"timestamp\":%lld}\n\n", fields, now_ms());
    int whole = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", size, frame);
    return send_all(fd, chunk, (size_t)whole);
}

/* The value of "command" with its escapes undone; enough for what the benchmark sends. */
static void command_of(const char *body, char *out, size_t room) {
    const char *at = strstr(body, "\"command\"");
    size_t used = 0;
    out[0] = 0;
    if (!at || !(at = strchr(at + 9, ':')) || !(at = strchr(at, '"'))) return;
    for (at++; *at && *at != '"' && used + 1 < room; at++) {
        char c = *at;
        if (c == '\\') c = *++at == 'n' ? '\n' : *at == 't' ? '\t' : *at;
        out[used++] = c;
    }
    out[used] = 0;
}

static void line_event(int fd, const char *line) {
    char fields[8200];
    size_t used = (size_t)snprintf(fields, sizeof fields, "\"type\":\"stdout\",\"text\":\"");
    for (; *line && used < sizeof fields - 8; line++) {
        if (*line == '"' || *line == '\\') fields[used++] = '\\';
        if ((unsigned char)*line >= 32) fields[used++] = *line;
    }
    fields[used++] = '"';
    fields[used] = 0;
    event(fd, fields);
}

static void run(int fd, const char *command) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
    int out[2], status = 0;
    char line[4096], fields[256];
    if (pipe2(out, O_CLOEXEC)) return;
    long long begun = now_ms();
    pid_t child = vfork();
    if (child == 0) {
        dup2(out[1], 1);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    send_all(fd, head, sizeof head - 1);
    event(fd, "\"type\":\"init\",\"text\":\"00000000000000000000000000000001\"");
    FILE *output = fdopen(out[0], "r");
    while (output && fgets(line, sizeof line, output)) {
        line[strcspn(line, "\n")] = 0;
        line_event(fd, line);
    }
    if (output) fclose(output);
    waitpid(child, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == 0) snprintf(fields, sizeof fields, "\"type\":\"execution_complete\",\"execution_time\":%lld", now_ms() - begun);
    else snprintf(fields, sizeof fields,
        "\"type\":\"error\",\"error\":{\"ename\":\"CommandExecError\",\"evalue\":\"%d\",\"traceback\":[]}", code);
    event(fd, fields);
    send_all(fd, "0\r\n\r\n", 5);
}

static void answer(int fd, const char *status, const char *body) {
    char text[512];
    int size = snprintf(text, sizeof text, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                        status, strlen(body), body);
    send_all(fd, text, (size_t)size);
}

static void *serve(void *argument) {
    int fd = (int)(long)argument, one = 1;
    char *data = malloc(REQUEST), method[16], path[1024], command[8192];
    size_t have = 0;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (;;) {
        char *end = NULL;
        while (have < REQUEST - 1 && !(end = have ? strstr(data, "\r\n\r\n") : NULL)) {
            ssize_t got = recv(fd, data + have, REQUEST - 1 - have, 0);
            if (got <= 0) goto out;
            have += (size_t)got;
            data[have] = 0;
        }
        if (!end || sscanf(data, "%15s %1023s", method, path) != 2) goto out;
        size_t head = (size_t)(end - data) + 4, body = 0;
        char *length = strcasestr(data, "\r\ncontent-length:");
        if (length && length < end) body = strtoul(length + 17, NULL, 10);
        if (head + body >= REQUEST) goto out;
        while (have < head + body) {
            ssize_t got = recv(fd, data + have, REQUEST - 1 - have, 0);
            if (got <= 0) goto out;
            have += (size_t)got;
            data[have] = 0;
        }
        const char *route = strncmp(path, "/proxy/44772", 12) ? path : path + 12;
        if (!strcmp(route, "/ping")) answer(fd, "200 OK", "");
        else if (!strcmp(route, "/command")) {
            char kept = data[head + body];
            data[head + body] = 0;
            command_of(data + head, command, sizeof command);
            data[head + body] = kept;
            run(fd, command);
        } else answer(fd, "404 Not Found", "{\"code\":\"NOT_FOUND\",\"message\":\"not in the stand-in\"}");
        have -= head + body;
        memmove(data, data + head + body, have + 1);
    }
out:
    close(fd);
    free(data);
    return NULL;
}

int main(void) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    signal(SIGPIPE, SIG_IGN);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 1024)) {
        perror("stub_agent");
        return 1;
    }
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        if (fd < 0) continue;
        if (pthread_create(&thread, NULL, serve, (void *)(long)fd)) close(fd);
        else pthread_detach(thread);
    }
}
