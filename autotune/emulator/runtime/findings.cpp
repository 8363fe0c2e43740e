// Findings: kept once for each place, with both parties; and the places themselves.
#include <dlfcn.h>
#include <link.h>

#include <chrono>
#include <map>
#include <tuple>

#include "core.h"

namespace emu {
namespace {

struct Image {  // the shared object that holds the kernel and this runtime
  uintptr_t base = 0, end = 0;
};

Image find_image() {
  Dl_info info;
  Image image;
  if (!dladdr(&emu_settings, &info)) return image;
  image.base = uintptr_t(info.dli_fbase);
  dl_iterate_phdr(
      [](dl_phdr_info *object, size_t, void *data) {
        Image &found = *static_cast<Image *>(data);
        if (object->dlpi_addr != found.base) return 0;
        for (int i = 0; i < object->dlpi_phnum; i++) {
          const auto &part = object->dlpi_phdr[i];
          if (part.p_type == PT_LOAD) found.end = std::max(found.end, found.base + part.p_vaddr + part.p_memsz);
        }
        return 1;
      },
      &image);
  return image;
}

const Image &image() {
  static const Image found = find_image();
  return found;
}

std::vector<Site> site_by_offset;          // 0 is "not met yet"
std::vector<uintptr_t> offset_by_site(1);  // site 0 is nowhere
std::map<std::tuple<Kind, Site, Site>, size_t> known;

}  // namespace

std::vector<Finding> findings;
bool stopped = false;
std::string launched = "";

bool in_image(uintptr_t address) { return address >= image().base && address < image().end; }
uintptr_t offset_of(Site site) { return offset_by_site[site]; }

Site site_of(void *pc) {
  const uintptr_t offset = uintptr_t(pc) - image().base;
  if (site_by_offset.empty()) site_by_offset.resize(image().end - image().base);
  if (offset >= site_by_offset.size()) return 0;
  Site &site = site_by_offset[offset];
  if (site == 0 && offset_by_site.size() < 65535) {
    site = Site(offset_by_site.size());
    offset_by_site.push_back(offset);
  }
  return site;
}

void forget_findings() {
  findings.clear();
  known.clear();
  stopped = false;
}

static void keep(Kind kind, Site site, const Other &other, const char *format, va_list arguments) {
  const auto place = std::make_tuple(kind, site, other.site);
  const auto seen = known.find(place);
  if (seen != known.end()) {
    findings[seen->second].count++;
    return;
  }
  if (int(findings.size()) >= emu_settings.max_findings) return;
  char text[1024];
  vsnprintf(text, sizeof text, format, arguments);
  Finding found{kind, text, launched, current ? current->id : -1, block.number, site, other,
                {block.grid[0], block.grid[1], block.grid[2]}, 1};
  known[place] = findings.size();
  findings.push_back(found);
}

void finding(Kind kind, Site site, Other other, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  keep(kind, site, other, format, arguments);
  va_end(arguments);
}

void stop(Kind kind, Site site, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  keep(kind, site, Other{}, format, arguments);
  va_end(arguments);
  stopped = true;
  leave_launch();
}

void check_time(Site site) {
  using namespace std::chrono;
  static int countdown = 0;
  if (--countdown > 0) return;
  countdown = 4096;
  const double now = duration<double>(steady_clock::now().time_since_epoch()).count();
  if (deadline > 0 && now > deadline) {
    deadline = 0;
    stop(Kind::timeout, site, "the launch ran longer than %g s", emu_settings.max_seconds);
  }
}

double deadline = 0;

}  // namespace emu

extern "C" void emu_fail(const char *message) { emu::stop(emu::Kind::misuse, emu::site_of(EMU_PC()), "%s", message); }
