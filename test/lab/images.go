package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// cacheEnv names the directory of the images. image/build.sh uses it too.
const cacheEnv = "NFSRDMAD_LAB_CACHE"

// An image is a guest's kernel and userland, as image/build.sh builds them.
type image struct {
	kernel, initramfs string // paths
	release           string // kernel release, as in uname -r
}

// cacheDir returns the directory of the images.
func cacheDir() (string, error) {
	if dir := os.Getenv(cacheEnv); dir != "" {
		return dir, nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "nfsrdmad-lab"), nil
}

func findImage(series string) (image, error) {
	dir, err := cacheDir()
	if err != nil {
		return image{}, err
	}
	dir = filepath.Join(dir, series)
	if _, err := os.Stat(filepath.Join(dir, "stamp")); err != nil {
		return image{}, fmt.Errorf("find image of kernel %s: %w; run \"make lab\"", series, err)
	}
	release, err := os.ReadFile(filepath.Join(dir, "release"))
	if err != nil {
		return image{}, err
	}
	return image{filepath.Join(dir, "vmlinuz"), filepath.Join(dir, "initramfs.cpio"),
		strings.TrimSpace(string(release))}, nil
}

// requireImage returns the image. If virtual machines are disabled, requireImage skips the test. If
// there is no image, it skips or fails the test, according to labEnv.
func requireImage(t testing.TB, series string) image {
	t.Helper()
	if os.Getenv(labEnv) == "0" {
		t.Skipf("virtual machines are disabled: %s=0", labEnv)
	}
	img, err := findImage(series)
	if err != nil {
		skipOrFail(t, err)
	}
	return img
}
