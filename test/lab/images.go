package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	// requireEnv is the environment variable that says whether the lab is wanted: "1" makes tests fail where it cannot run, "0" makes them
	// skip everywhere. Otherwise they skip where there are no images.
	requireEnv = "NFSRDMAD_LAB"
	// cacheEnv names the directory of the images, for image/build.sh too.
	cacheEnv = "NFSRDMAD_LAB_CACHE"
)

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
	return image{filepath.Join(dir, "vmlinuz"), filepath.Join(dir, "initramfs.cpio"), strings.TrimSpace(string(release))}, nil
}

// need returns the image, or skips or fails the test as requireEnv says.
func need(t testing.TB, series string) image {
	t.Helper()
	want := os.Getenv(requireEnv)
	if want == "0" {
		t.Skipf("no virtual machines are wanted: %s=0", requireEnv)
	}
	img, err := findImage(series)
	if err != nil {
		if want == "1" {
			t.Fatal(err)
		}
		t.Skipf("THE LAB DID NOT RUN: %v", err)
	}
	return img
}
