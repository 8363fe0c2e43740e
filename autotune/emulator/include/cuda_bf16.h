#pragma once
#include "emu/float16.h"
