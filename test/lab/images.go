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
	root              string // path of the root file system with systemd, if the guest uses it
}

// systemdImage is the directory of the Debian with systemd.
const systemdImage = "systemd"

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
	return image{kernel: filepath.Join(dir, "vmlinuz"), initramfs: filepath.Join(dir, "initramfs.cpio"),
		release: strings.TrimSpace(string(release))}, nil
}

// requireSystemd returns the path of the root file system with systemd. Without one it skips or
// fails the test, according to labEnv.
func requireSystemd(t testing.TB) string {
	t.Helper()
	dir, err := cacheDir()
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, systemdImage, "stamp"))
	}
	if err != nil {
		skipOrFail(t, fmt.Errorf("find image of Debian with systemd: %w; run \"make lab\"", err))
	}
	return filepath.Join(dir, systemdImage, "root.ext4")
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
