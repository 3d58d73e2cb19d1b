#define grid_size_x 31250
#define grid_size_y 1
#define grid_size_z 1
#define block_size_x 32
#define block_size_y 1
#define block_size_z 1
#define vec 1
#define flag True
#define name a b
#define f 0.5
#define kernel_tuner 1
#line 1
float foo() {return 1;}