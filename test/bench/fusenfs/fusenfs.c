/*
 * fusenfs URL DIR: mount an NFS export with libnfs and libfuse, in the foreground.
 *
 * "make bench" compares nfsrdmad with this program. It works like fuse-nfs, which Debian does not
 * have: the path interface of libfuse, NFS over TCP, names and attributes cached for one second.
 * Each thread has a connection to the server, so calls of several threads do not wait for each
 * other. The program ends when it is unmounted, or when its standard input ends.
 */
#define FUSE_USE_VERSION 35
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <nfsc/libnfs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *url_text;
static pthread_key_t context_key;

static struct nfs_context *connect_server(void)
{
	struct nfs_context *nfs = nfs_init_context();
	struct nfs_url *url = nfs ? nfs_parse_url_dir(nfs, url_text) : NULL;
	int err = url ? nfs_mount(nfs, url->server, url->path) : -EINVAL;

	if (err) {
		fprintf(stderr, "fusenfs: mount %s: %s\n", url_text, nfs ? nfs_get_error(nfs) : "out of memory");
		exit(1);
	}
	nfs_destroy_url(url);
	return nfs;
}

/* server returns the connection of this thread. */
static struct nfs_context *server(void)
{
	struct nfs_context *nfs = pthread_getspecific(context_key);

	if (!nfs) {
		nfs = connect_server();
		pthread_setspecific(context_key, nfs);
	}
	return nfs;
}

static void disconnect(void *nfs) { nfs_destroy_context(nfs); }

static struct nfsfh *handle(struct fuse_file_info *fi) { return (struct nfsfh *)(uintptr_t)fi->fh; }

static void fill(struct stat *st, const struct nfs_stat_64 *in)
{
	memset(st, 0, sizeof *st);
	st->st_dev = in->nfs_dev;
	st->st_ino = in->nfs_ino;
	st->st_mode = in->nfs_mode;
	st->st_nlink = in->nfs_nlink;
	st->st_uid = in->nfs_uid;
	st->st_gid = in->nfs_gid;
	st->st_rdev = in->nfs_rdev;
	st->st_size = in->nfs_size;
	st->st_blksize = in->nfs_blksize;
	st->st_blocks = in->nfs_blocks;
	st->st_atim.tv_sec = in->nfs_atime;
	st->st_mtim.tv_sec = in->nfs_mtime;
	st->st_ctim.tv_sec = in->nfs_ctime;
}

static int get_attr(const char *path, struct stat *st, struct fuse_file_info *fi)
{
	struct nfs_stat_64 in;
	int err = fi ? nfs_fstat64(server(), handle(fi), &in) : nfs_lstat64(server(), path, &in);

	if (!err)
		fill(st, &in);
	return err;
}

/* With nullpath_ok, read_dir gets no path. */
static int open_dir(const char *path, struct fuse_file_info *fi)
{
	char *copy = strdup(path);

	fi->fh = (uintptr_t)copy;
	return copy ? 0 : -ENOMEM;
}

static int release_dir(const char *path, struct fuse_file_info *fi)
{
	free((char *)(uintptr_t)fi->fh);
	return 0;
}

static int read_dir(const char *path, void *buf, fuse_fill_dir_t add, off_t off, struct fuse_file_info *fi,
		    enum fuse_readdir_flags flags)
{
	struct nfsdir *dir;
	struct nfsdirent *e;
	int err = nfs_opendir(server(), (char *)(uintptr_t)fi->fh, &dir);

	if (err)
		return err;
	while ((e = nfs_readdir(server(), dir)))
		add(buf, e->name, NULL, 0, 0);
	nfs_closedir(server(), dir);
	return 0;
}

static int open_file(const char *path, struct fuse_file_info *fi)
{
	struct nfsfh *fh;
	int err = nfs_open(server(), path, fi->flags & O_ACCMODE, &fh);

	fi->fh = (uintptr_t)fh;
	return err;
}

static int create(const char *path, mode_t mode, struct fuse_file_info *fi)
{
	struct nfsfh *fh;
	int err = nfs_create(server(), path, fi->flags & (O_ACCMODE | O_EXCL | O_TRUNC), mode & 07777, &fh);

	fi->fh = (uintptr_t)fh;
	return err;
}

static int release(const char *path, struct fuse_file_info *fi) { return nfs_close(server(), handle(fi)); }

static int read_file(const char *path, char *buf, size_t n, off_t off, struct fuse_file_info *fi)
{
	return nfs_pread(server(), handle(fi), off, n, buf);
}

static int write_file(const char *path, const char *buf, size_t n, off_t off, struct fuse_file_info *fi)
{
	return nfs_pwrite(server(), handle(fi), off, n, buf);
}

static int sync_file(const char *path, int data, struct fuse_file_info *fi)
{
	return nfs_fsync(server(), handle(fi));
}

static int truncate_file(const char *path, off_t size, struct fuse_file_info *fi)
{
	return fi ? nfs_ftruncate(server(), handle(fi), size) : nfs_truncate(server(), path, size);
}

static int make_dir(const char *path, mode_t mode) { return nfs_mkdir2(server(), path, mode & 07777); }
static int remove_dir(const char *path) { return nfs_rmdir(server(), path); }
static int remove_file(const char *path) { return nfs_unlink(server(), path); }

static int rename_file(const char *from, const char *to, unsigned flags)
{
	return flags ? -EINVAL : nfs_rename(server(), from, to);
}

static void *configure(struct fuse_conn_info *conn, struct fuse_config *cfg)
{
	cfg->use_ino = 1;
	cfg->entry_timeout = cfg->attr_timeout = 1;
	cfg->nullpath_ok = 1;
	return NULL;
}

/* end_with_input ends the program when the test that started it has ended. */
static void *end_with_input(void *unused)
{
	char c;

	while (read(0, &c, 1) > 0)
		;
	_exit(1);
}

int main(int argc, char **argv)
{
	static const struct fuse_operations operations = {
		.init = configure, .getattr = get_attr, .opendir = open_dir, .readdir = read_dir,
		.releasedir = release_dir, .open = open_file, .create = create,
		.release = release, .read = read_file, .write = write_file, .fsync = sync_file,
		.truncate = truncate_file, .mkdir = make_dir, .rmdir = remove_dir, .unlink = remove_file,
		.rename = rename_file,
	};
	char *args[] = { argv[0], "-f", "-o", "allow_other,default_permissions,fsname=fusenfs", argv[2], NULL };
	pthread_t watch;

	if (argc != 3) {
		fprintf(stderr, "usage: fusenfs URL DIR\n");
		return 2;
	}
	url_text = argv[1];
	pthread_key_create(&context_key, disconnect);
	pthread_create(&watch, NULL, end_with_input, NULL);
	return fuse_main(5, args, &operations, NULL);
}
