// Stands in for the egress enforcer: says what it is told to, and what it can do and see, as events. Enforces nothing.
//
// MODE: ready (default), silent (never ready), ends (at once, with a word of why).
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static void note(const char *what, const char *detail) {
    printf("{\"event\":{\"kind\":\"noted\",\"what\":\"%s\",\"detail\":\"%s\"}}\n", what, detail);
}

static void list(const char *what, const char *path, int numbers_only) {
    char text[2048] = "";
    struct dirent *entry;
    DIR *dir = opendir(path);
    while (dir && (entry = readdir(dir)))
        if (entry->d_name[0] != '.' && (!numbers_only || (entry->d_name[0] >= '0' && entry->d_name[0] <= '9')) &&
            strlen(text) + strlen(entry->d_name) < sizeof text - 2) {
            strcat(text, entry->d_name);
            strcat(text, " ");
        }
    if (dir) closedir(dir);
    note(what, text);
}

static void line_of(const char *what, const char *path, const char *prefix) {
    char line[256];
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, prefix, strlen(prefix))) {
            for (char *c = line; *c; c++)
                if (*c < ' ' || *c == '"') *c = ' ';
            note(what, line);
        }
    if (file) fclose(file);
}

static void asked(int signal) {
    (void)signal;
    static const char text[] = "{\"event\":{\"kind\":\"noted\",\"what\":\"asked\",\"detail\":\"alive\"}}\n";
    if (write(1, text, sizeof text - 1) < 0) _exit(1);
}

int main(void) {
    const char *mode = getenv("MODE");
    char text[256];
    if (mode && !strcmp(mode, "ends")) {
        fprintf(stderr, "no rules\nhere\n");
        return 3;
    }
    signal(SIGUSR1, asked);
    if (mode && !strcmp(mode, "silent"))
        for (;;) pause();
    snprintf(text, sizeof text, "%d %d pid %d", getuid(), getgid(), getpid());
    note("ids", text);
    line_of("capabilities", "/proc/self/status", "CapEff");
    line_of("bounding", "/proc/self/status", "CapBnd");
    line_of("filter", "/proc/self/status", "Seccomp:");
    list("root", "/", 0);
    list("descriptors", "/proc/self/fd", 0);
    list("interfaces", "/proc/sys/net/ipv4/conf", 0);
    list("processes", "/proc", 1);
    note("box", getenv("SANDGLASS_EGRESS_BOX"));
    note("setting", getenv("SETTING") ? getenv("SETTING") : "");
    // What must be refused, and what must not.
    snprintf(text, sizeof text, "%s %s %s %s", mkdir("/made", 0700) ? "kept" : "wrote",
             open("/sandglass-egress", O_WRONLY) < 0 ? "kept" : "wrote", setuid(7) ? "kept" : "became",
             open("/state/policy.json", O_WRONLY | O_CREAT, 0600) < 0 ? "lost" : "stored");
    note("attempts", text);
    FILE *certificate = fopen("/authority/new", "w");
    if (certificate) {
        fputs("a certificate\n", certificate);
        fclose(certificate);
        rename("/authority/new", "/authority/mitmproxy-ca-cert.pem");
    }
    printf("{\"ready\":true}\n");
    fflush(stdout);
    for (;;) pause();
}
