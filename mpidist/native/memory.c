/* Memory: registered segments, overlaps, copies, and access to other processes. */

#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t nc_segment_bytes(const nc_sizes *s)
{
    return PAGE + 2 * rounded(s->small) + NC_DEPTH * rounded(s->chunk) + (size_t)s->lanes * rounded(s->slice);
}

void nc_room(nc *c, char *const *segments, const nc_sizes *sizes)
{
    for (int r = 0; r < c->ranks; r++)
        c->slots[r] = segments[r] + SKEW;
    c->sizes = (nc_sizes){rounded(sizes->small), rounded(sizes->chunk), rounded(sizes->slice), sizes->lanes,
                          sizes->usual};
}

int nc_segment(nc *c, char *const *bases, size_t bytes)
{
    if (c->segments == NC_SEGMENTS)
        return -1;
    memcpy(c->base[c->segments], bases, sizeof *bases * (size_t)c->ranks);
    c->segment_bytes[c->segments] = bytes;
    return c->segments++;
}

int64_t core_place_of(const nc *c, const char *address, size_t bytes)
{
    for (int s = 0; s < c->segments; s++) {
        const char *base = c->base[s][c->rank];
        if (address >= base && address + bytes <= base + c->segment_bytes[s])
            return MAPPED - ((int64_t)s << SEGMENT_SHIFT | (address - base));
    }
    return PRIVATE;
}

int nc_is_shared(const nc *c, const void *address, size_t bytes) { return core_place_of(c, address, bytes) != PRIVATE; }

void core_copy(char *to, const char *from, size_t bytes, int streamed)
{
#if defined(__x86_64__)
    if (streamed && bytes >= 256) {
        size_t head = (16 - (uintptr_t)to % 16) % 16;
        memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i d = _mm_loadu_si128((const __m128i *)(from + 32));
            __m128i e = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), d);
            _mm_stream_si128((__m128i *)(to + 48), e);
        }
        _mm_sfence();
    }
#else
    (void)streamed;
#endif
    memcpy(to, from, bytes);
}

/* Shell sort, because qsort may allocate memory. */
static void sort_by_address(nc_range *ranges, int n)
{
    int gap = 1;
    while (gap < n / 3)
        gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int i = gap; i < n; i++) {
            nc_range moved = ranges[i];
            int at = i;
            for (; at >= gap && ranges[at - gap].begin > moved.begin; at -= gap)
                ranges[at] = ranges[at - gap];
            ranges[at] = moved;
        }
}

int nc_overlap(const nc_range *inputs, int n, nc_range *outs, int m)
{
    sort_by_address(outs, m);
    for (int i = 1; i < m; i++) /* nested in the previous one: extend it, so that ends are sorted, too */
        if (outs[i].end < outs[i - 1].end)
            outs[i].end = outs[i - 1].end;
    for (int i = 0; i < n; i++) {
        int low = 0, high = m; /* the first result that ends after the start of the input */
        while (low < high) {
            int middle = (low + high) / 2;
            if (outs[middle].end <= inputs[i].begin)
                low = middle + 1;
            else
                high = middle;
        }
        for (; low < m && outs[low].begin < inputs[i].end; low++)
            if (outs[low].piece != inputs[i].piece || outs[low].begin != inputs[i].begin)
                return 1;
    }
    return 0;
}

static int transfer(int pid, char *here, char *there, size_t bytes, int writes)
{
    while (bytes) { /* the kernel may copy fewer bytes than requested */
        struct iovec from = {here, bytes}, to = {there, bytes};
        ssize_t done = writes ? process_vm_writev(pid, &from, 1, &to, 1, 0)
                              : process_vm_readv(pid, &from, 1, &to, 1, 0);
        if (done <= 0) {
            errno = done < 0 ? errno : EFAULT;
            return -1;
        }
        here += done, there += done, bytes -= (size_t)done;
    }
    return 0;
}

int nc_read(int pid, void *to, const void *from, size_t bytes)
{
    return transfer(pid, to, (char *)(intptr_t)from, bytes, 0);
}

int nc_write(int pid, void *to, const void *from, size_t bytes)
{
    return transfer(pid, (char *)(intptr_t)from, to, bytes, 1);
}
