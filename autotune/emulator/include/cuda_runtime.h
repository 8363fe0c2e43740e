#pragma once
#include "emu/host.h"
