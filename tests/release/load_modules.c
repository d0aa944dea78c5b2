/* Loads shared libraries, as an emulator of another machine can: load_modules LIBRARY... */
#include <dlfcn.h>
#include <stdio.h>

int
main(int count, char **names)
{
    int failed = count < 2;
    for (int i = 1; i < count; i++)
        if (!dlopen(names[i], RTLD_NOW)) { /* with all symbols that it needs */
            fprintf(stderr, "load_modules: %s\n", dlerror());
            failed = 1;
        }
    return failed;
}
