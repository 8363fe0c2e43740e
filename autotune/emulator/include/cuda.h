#pragma once
#include "emu/driver.h"
#include "emu/host.h"
