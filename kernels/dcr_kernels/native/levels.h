/* Which kernels this processor can run, and those that are used. */
#ifndef DCR_LEVELS_H
#define DCR_LEVELS_H

#include "kernels.h"

#define MOST_LEVELS 3

/* The best last. */
extern const struct kernels *levels[MOST_LEVELS];
extern size_t level_count;
extern const struct kernels *active;

/* Fills in the keys of kernels.h and the above. */
void start_levels(void);

#endif
