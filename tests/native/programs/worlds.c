/* Makes worlds; see worlds.h. */

#include "worlds.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

static char *aligned(size_t bytes)
{
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    char *found = aligned_alloc(PAGE, bytes);
    if (found == NULL)
        fail("no memory for %zu bytes", bytes);
    memset(found, 0, bytes);
    return found;
}

static void make_node(world *w, int n)
{
    node_memory *node = &w->node[n];
    size_t ranks = (size_t)w->plan.ranks[n];
    node->control = aligned(nc_control_bytes(w->plan.ranks[n]));
    node->own_bytes = w->plan.most_bytes * 2;
    node->common = memory(w->plan.most_bytes + 64);
    for (int i = 0; i < 2; i++)
        node->expected[i] = memory(w->plan.most_bytes * ranks);
    for (int r = 0; r < w->plan.ranks[n]; r++) {
        node->slots[r] = aligned(nc_segment_bytes(&w->plan.sizes));
        node->own[r] = memory(node->own_bytes);
    }
}

world *make_world(world_plan plan)
{
    world *w = memory(sizeof *w);
    w->plan = plan;
    for (int n = 0; n < plan.nodes; n++)
        make_node(w, n);
    return w;
}

void free_world(world *w)
{
    for (int n = 0; n < w->plan.nodes; n++) {
        node_memory *node = &w->node[n];
        for (int r = 0; r < w->plan.ranks[n]; r++) {
            free(node->slots[r]), free(node->own[r]);
            for (int i = 0; i < WIRE_SLOTS; i++)
                free(w->wire[n][r].data[i]);
        }
        free(node->control), free(node->common), free(node->expected[0]), free(node->expected[1]);
    }
    free(w);
}
