package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// cacheEnv names the directory of the images, for image/build.sh too.
const cacheEnv = "NFSRDMAD_LAB_CACHE"

// An image is a guest's kernel and userland, as image/build.sh leaves them.
type image struct {
	kernel, initramfs string // paths
	release           string // of the kernel, as in uname -r
}

// cacheDir is where image/build.sh puts the images.
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
		return image{}, fmt.Errorf("no image of kernel %s: %w; run \"make lab\"", series, err)
	}
	release, err := os.ReadFile(filepath.Join(dir, "release"))
	if err != nil {
		return image{}, err
	}
	return image{filepath.Join(dir, "vmlinuz"), filepath.Join(dir, "initramfs.cpio"),
		strings.TrimSpace(string(release))}, nil
}

// need returns the image, or skips or fails the test as wantEnv says.
func need(t testing.TB, series string) image {
	t.Helper()
	SkipUnwanted(t)
	img, err := findImage(series)
	if err != nil {
		missing(t, err)
	}
	return img
}
