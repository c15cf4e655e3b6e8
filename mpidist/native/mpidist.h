/* What the files of the native core share. A placeholder. */
#ifndef MPIDIST_H
#define MPIDIST_H

#define NC_EXPORT __attribute__((visibility("default")))

/* The id of the sources that the library was built from: NC_BUILD, which the build defines. */
NC_EXPORT const char *nc_build(void);

#endif
